"""Structs that Redis holds as JSON: requests, log entries, events, models and their assignments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

LOOKUP_TOKENS = 8
"""Default of a model's `lookup`."""


FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "cancelled", "expired", "unavailable", "error"]
"""The reason why a choice ended. The last four never come from a model: a cancel, a deadline, a model that was given up
or unloaded, a failure."""


GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "choice"]


class Grammar(msgspec.Struct, frozen=True):
    """The grammar of every choice's text. `text` is JSON for `json_schema` (the schema) and `choice` (a list of texts),
    and empty for `json_object`."""

    kind: GrammarKind
    text: str = ""


class ReasoningBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The most tokens of a reasoning at an answer's beginning; then `closing` are forced."""

    tokens: int
    open: str
    close: str
    closing: list[int]
    """The tokens of `close`."""
    opening: list[int]
    """The tokens of `open`."""
    begun: bool = False
    """True if the prompt ends inside the reasoning."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters by which a request's tokens are sampled; every default has been resolved by the API.

    `seed` is a decimal string of an unsigned 64-bit number ("" until enqueue draws one): Lua's numbers are doubles.
    `stop_ids` holds every end-of-sequence id of the model too, unless `ignore_eos`.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    dry_multiplier: float = 0.0
    """0: no penalty for tokens that would repeat a sequence of the context (worker/sampling/dry.py)."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    """The number of the context's last tokens that are compared; -1: all of them."""
    dry_sequence_breakers: list[str] = []
    """Texts across which no repetition is counted."""
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    top_n_sigma: float = 0.0
    """0: off."""
    dynatemp_range: float = 0.0
    """0: off. Else the temperature is up to so much below or above `temperature`, and applied after the filters."""
    dynatemp_exponent: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []
    """Empty: any token may come."""
    bad_words: list[list[int]] = []
    """Sequences of tokens: the last token of one is forbidden where the output ends with those before it."""
    seed: str = ""
    stop: list[str] = []
    stop_ids: list[int] = []
    logprobs: int | None = None
    """None: none. k ≥ 0: the chosen token's and the k most likely ones'."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt. With `max_tokens` 0 they are all that is wanted."""
    n: int = 1
    grammar: Grammar | None = None
    reasoning: ReasoningBudget | None = None
    lookup: int | None = None  # most guesses of a step, where the model has more; they change no token
    prediction: list[int] = []  # tokens that the answer may have: guesses come from them too
    adapter: str = ""  # of an external engine: the name of the low-rank adapter (LoRA) that it adds to the model
    dimensions: int | None = None  # of a vector: so many of its first numbers, at length 1 again; None: all


class Input(msgspec.Struct, frozen=True, array_like=True):
    """One input of a model that gives vectors or scores: its number of tokens, and where its second text begins.
    `second` is 0 for a single text."""

    tokens: int
    second: int = 0


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """An image in a prompt: `count` placeholders from position `start` on stand for it.

    `height` and `width` are those of its pixels as the model takes them; `digest` is the SHA-256 of these and the
    pixels, in hexadecimal. The pixels lie beside the request (control.requests.enqueue).
    """

    start: int
    count: int
    height: int
    width: int
    digest: str


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters of a generation; the `params` field of the request's hash."""

    prompt: list[int]
    sampling: Sampling
    images: list[PromptImage] = []
    """In the order of their places."""
    cache_salt: str = ""
    """Its prefixes are shared only among requests with the same salt. Its first line names the tenant, or all that
    share (`api.generation.client_request`); the client's own salt follows."""
    inputs: list[Input] = []
    """The inputs of vectors or scores, one for each choice, which lie one after the other in `prompt`. Empty: every
    choice continues the whole prompt."""

    def prompt_of(self, choice: int) -> list[int]:
        """The tokens of a choice's prompt."""
        if not self.inputs:
            return self.prompt
        begin = sum(one.tokens for one in self.inputs[:choice])
        return self.prompt[begin : begin + self.inputs[choice].tokens]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of the chosen token, and `(token, logprob)` of the most likely ones, best first."""

    chosen: float
    top: list[tuple[int, float]] = []


class PromptToken(msgspec.Struct, frozen=True, array_like=True):
    """A token of the prompt as the model saw it come: its log probability after those before it, its place among all
    tokens by that (1: the most likely one), and the most likely ones, best first. The first token has none of these."""

    token: int
    logprob: float | None = None
    rank: int = 0
    top: list[tuple[int, float]] = []


class LogEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One entry of a request's token log, and one element of an event's row.

    `seq` counts from 1 over all choices in emission order. `token` is None where a choice ends without one (cancel,
    deadline, error). `cause` says what ended it: "token", a stop string, or a message. `cached`, in a request's first
    entry, counts the prompt tokens whose KV was there already and was not computed for it. `prompt` are the next tokens
    of the choice's prompt, where the request wants them scored; all of them come before the choice's first token.
    """

    seq: int
    choice: int
    token: int | None
    finish: FinishReason | None = None
    cause: str | None = None
    logprobs: TokenLogprobs | None = None
    cached: int | None = None
    prompt: list[PromptToken] | None = None
    vector: bytes | None = None
    """The result of a choice that is an input: little-endian float32 numbers, in JSON as base64."""
    fingerprint: str | None = None
    """That of the replica's backend, in a request's first entry and in the first one of a replica with another."""
    predicted: int | None = None  # in a choice's last entry: the tokens of its request's prediction that it has


class EventRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The entries that one request emitted in one step; an event is a JSON list of rows."""

    rid: str
    entries: list[LogEntry]


RequestState = Literal["queued", "running", "finished", "cancelled", "expired", "dead"]


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model as the operator wants it; kept as the fields of its `spec` hash."""

    name: str
    source: str
    """A folder, a GGUF file, or a Hugging Face repository id."""
    gguf: str | None = None
    """The GGUF file of the source: `Q4_K_M`, or a file's name."""
    tp: int = 1
    replicas: int = 1
    """The most that run, and the least as well where `min_replicas` is not given."""
    min_replicas: int | None = None
    """0: the model sleeps while it has no requests. Fewer than `replicas`: as many run as its requests need."""
    target_wait_s: float = 2.0  # with `min_replicas`: one more replica runs where requests expect to wait longer
    idle_s: int = 600  # with `min_replicas` 0: a model without requests for so long goes to sleep
    devices: list[str] = []
    """Empty: the host chooses. Else one per rank: `cpu`, `cuda:0`, …"""
    dtype: str = "auto"
    quant: str | None = None  # packing of the weights on CPUs
    dequantize: bool = False  # weights that a GGUF file has in blocks become plain numbers
    max_context: int | None = None
    kv_tokens: int | None = None
    kv_type: str = "auto"  # how keys and values are stored on CPUs: one of KV_TYPES
    lookup: int = LOOKUP_TOKENS  # most tokens of a sequence that are guessed from its context and verified in one step
    deterministic: bool = False  # serve only where a token's bits depend on no other request
    prefix_cache: bool = True  # whether requests may begin with KV that others have computed
    images: bool = True  # False: the encoder of images is not loaded, and images are refused
    spread: bool = False  # the ranks of a replica go to as many hosts as live, not to one
    drain_s: int = 300  # how long a replica that is to go may finish what it runs; the rest is given back then
    surge: bool = True  # one more replica than wanted may run while others are replaced
    paused: bool = False  # requests are queued, but leaders claim none
    engine: str = "furrow"  # what computes: Furrow's ranks, or an external engine of control/engines.py
    engine_args: dict[str, str] = {}
    """Options of an external engine."""
    sampling: dict[str, float] = {}
    """Defaults of sampling parameters, which go before those of the model's files."""
    adapters: dict[str, str] = {}
    """Low-rank adapters (LoRA) of an external engine: their files on each host, by the name in `MODEL:NAME`."""
    revision: int = 1
    """Grows with each change that a running replica can't follow; a replica of an older revision is replaced."""
    unload: bool = False
    """The tombstone: only this means unload, never the absence of a spec."""

    @property
    def least_replicas(self) -> int:
        """As many run whether there are requests or not."""
        return self.replicas if self.min_replicas is None else min(self.min_replicas, self.replicas)

    @property
    def group_size(self) -> int:
        """Processes of a replica that beat: its ranks, or the leader of an external engine, which has all devices."""
        return self.tp if self.engine == "furrow" else 1

    @property
    def on_demand(self) -> bool:
        """True if the number of replicas follows the requests."""
        return self.least_replicas < self.replicas


Place = tuple[str, str]
"""A model and one of its replicas."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one replica that one host shall run."""

    spec: ModelSpec
    replica: str
    ranks: list[int]
    devices: list[str]
    """One per entry of `ranks`."""
    withdrawn: bool = False
    """The tombstone: its host drains and stops the ranks. A missing assignment changes nothing."""
    at_once: bool = False  # with the tombstone: another host has these ranks, so nothing is finished first
    memory: list[int] = []
    """Bytes of the host's memory that each rank of `ranks` may take; empty where its need is not known."""
    device_memory: list[int] = []
    """Bytes of its accelerator's memory that each rank of `ranks` may take, 0 for one on a CPU; empty where that is not
    planned."""
    kv_tokens: int | None = None
    """Those of the replica where the specification names none; None: as many as the free memory holds at load."""
    shares: list[int] = []
    """By rank of the replica, how many units of all heads and widths it has, where they are uneven; the same in all
    parts of a replica."""
    kv_target: int | None = None
    """The replica is asked to do with so many. `kv_tokens` and `memory` are its own until its leader does."""

    @property
    def place(self) -> Place:
        return self.spec.name, self.replica

    @property
    def kv_limit(self) -> int | None:
        """The most KV tokens with which its ranks may be started; None: the specification's."""
        return self.kv_tokens if self.kv_target is None else self.kv_target


ModelKind = Literal["generate", "embed", "score"]
"""The results of a model: text, a vector of each input, or a score of each pair of texts."""


class PoolingAssets(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parts of a model for vectors or scores that an API process needs."""

    kind: ModelKind
    dimensions: int
    """Numbers of a vector; 1 for a score."""
    lower: bool = False
    """True if texts are put into lower case before they are tokenised."""
    types: bool = False
    """True if the model tells the two texts of a pair apart."""
    prompts: dict[str, str] = {}
    """Texts to put before an input, by name."""
    default_prompt: str = ""
    """The name of the one that is used where a request names none; empty: none."""
    pair: str = ""
    """The form of a pair of texts for a causal model, with {query}, {document} and {instruction}. Empty: the
    tokenizer's own pairs."""
    instruction: str = ""
    """The default of {instruction}."""


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """The form in which a model takes images. `grid`: sides become multiples of `unit` pixels within limits of pixels.
    `square`: both sides become `side`. Each square of `unit` pixels is one token."""

    kind: Literal["grid", "square"]
    token: int
    """The token that stands for a part of an image, once for each part."""
    placeholder: str
    """The text that the chat template writes for an image."""
    text: str | None = None
    """The text that takes the place of `placeholder` before the prompt is tokenised, with the token's own text in it;
    None: the placeholder is the token's text."""
    unit: int
    least_pixels: int
    most_pixels: int
    side: int = 0
    """Of `square`: pixels."""
    resample: int
    """Pillow's number of the filter that resizes."""


class ModelAssets(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a model that an API process needs, so that it reads no model files."""

    tokenizer_json: str
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    generation_config: dict[str, Any]
    context_length: int
    vocab_size: int
    eos_ids: list[int]
    kv_tokens: int
    """Tokens of KV memory on the tightest rank."""
    longest_tokens: int = 0
    """Positions of the longest sequence that they hold, where that is more (`KVCost.longest`); 0: as many."""
    created: int
    """Unix seconds at which the model was loaded first."""
    pooling: PoolingAssets | None = None
    """The preparation of inputs for a model that gives vectors or scores; None for one that generates text."""

    @property
    def kind(self) -> ModelKind:
        return "generate" if self.pooling is None else self.pooling.kind

    images: ImageInput | None = None
    """None: it takes text only."""
    engine: str = "furrow"
    """The engine that computes its tokens, by which requests are admitted (control/engines.py)."""
    adapters: list[str] = []
    """Names of its adapters: clients write `MODEL:NAME`."""

    def with_kv(self, tokens: int, longest: int) -> ModelAssets:
        """The same with so many KV tokens, which hold a sequence of `longest` positions."""
        return msgspec.structs.replace(self, kv_tokens=tokens, longest_tokens=longest if longest > tokens else 0)

    @property
    def memory_tokens(self) -> int:
        """Positions of the longest sequence that the KV memory holds."""
        return self.longest_tokens or self.kv_tokens

    @property
    def most_tokens(self) -> int:
        """Positions of the longest sequence, within the model's context and the KV memory."""
        return min(self.context_length, self.memory_tokens)


encode = msgspec.json.Encoder().encode
"""One JSON object or list, without white space."""

decode_request = msgspec.json.Decoder(GenerationRequest).decode
decode_event = msgspec.json.Decoder(list[EventRow]).decode


def describe_structs() -> None:
    """Make the description of every struct type that is imported; call it before the first thread starts.

    msgspec 0.22 makes it when a type is first decoded, and shares it before it is complete: a second thread that
    decodes the same type in this moment ends the process with a segmentation fault.
    """
    for kind in dict.fromkeys(_subclasses(msgspec.Struct)):
        msgspec.json.Decoder(kind)


def _subclasses(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
