"""llama.cpp's own routes: the bodies of /completion and /infill, the completions for which these stand, and the answers
of both and of /apply-template, /props and /slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from api.schemas.answers import Shape, Timings
from api.schemas.completions import CompletionRequest, check_completion
from api.schemas.decoding import Names, Warnings, convert_part, decode_request, naming, refusal
from api.schemas.generation import MAX_BIASES, MAX_PARTS, UNLIMITED, CommonFields
from control.bounds import RANGES
from control.errors import RequestError
from control.messages import Sampling

SETTINGS = "generation_settings"
PROMPTS = "prompts"
PROMPT_TOKENS = "prompt_tokens"
# Of `View.extra_fields`: what the last part of an answer repeats, and which fields are shown.
FIELDS = "response_fields"
SHOWS_IDS = "return_tokens"
FILLS = "fills_context"

UNTIL_FULL = -2
"""llama.cpp's limit that is the context."""
_NEVER = -100.0
"""The bias of a token that must not come."""
_NAMES = {r"^logprobs$": "n_probs", r"^max_tokens$": "n_predict"}
WITHOUT_EFFECT = {
    "n_indent": "an answer does not end by its indentation",
    "t_max_predict_ms": "use 'timeout' to limit a request's time",
}


def warn_without_effect(request: CommonFields, reasons: Mapping[str, str], warnings: Warnings | None) -> None:
    """Add a warning for each of these fields that the request has."""
    for name, why in reasons.items():
        if getattr(request, name) and warnings is not None:
            warnings.add(f"'{name}' has no effect: {why}.", name)


class LlamaCppCompletion(CompletionRequest, kw_only=True, forbid_unknown_fields=True):
    """The completion of a body in llama.cpp's form; no client sends it."""

    @property
    def token_limit(self) -> int | None:
        """None: up to the model's own end."""
        return None if self.unlimited else self.max_tokens

    @property
    def least_tokens(self) -> int:
        """0 has the prompt in the cache; llama.vim sends it."""
        return 0

    @property
    def continuous_usage(self) -> bool:
        """Each part of an answer has the counts so far, as each choice has."""
        return True

    @property
    def names(self) -> Names:
        """The client's own names of parameters."""
        raise NotImplementedError


class PromptText(msgspec.Struct, kw_only=True):
    """A prompt in the form that may have images, which are not served here."""

    prompt_string: str
    multimodal_data: Any = None


class NativeRequest(CommonFields, kw_only=True, forbid_unknown_fields=True):
    prompt: str | PromptText | list[str | int | PromptText | list[int | str]]
    """Text, token ids, ids and texts in a row, or a list of these."""
    max_tokens: int | None = None
    """In its own name `n_predict`: -1, the default, and -2 are no limit."""
    n: int | None = None
    n_probs: int | None = None
    logit_bias: list[list[Any]] | dict[str, float | bool] | None = None  # pyright: ignore[reportIncompatibleVariableOverride] # a form more than at OpenAI
    """Pairs, or a mapping, from token ids or texts to biases; false: never."""
    grammar: str | None = None
    json_schema: Any = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None
    post_sampling_probs: bool | None = None
    # Hints without an effect on the answer.
    return_progress: bool | None = None
    t_max_prompt_ms: float | None = None
    # Accepted with a warning.
    n_indent: int | None = None
    t_max_predict_ms: float | None = None


class NativeCompletion(LlamaCppCompletion, kw_only=True, forbid_unknown_fields=True):
    """The completion of a body of /completion."""

    mixed_prompts: dict[int, list[int | str]] = {}
    """By their places, prompts of ids and texts in a row; `prompt` has the ids alone of these."""
    text_biases: dict[str, float] = {}
    """Biases of all tokens of a text."""
    response_fields: list[str] = []
    shows_ids: bool = False

    @property
    def names(self) -> Names:
        return _NAMES

    def shown_fields(self, members: list[tuple[int, str]], sampling: Sampling) -> dict[str, Any]:
        """The fields that the answer repeats; `members`: the tokens of each prompt, and its text."""
        fields: dict[str, Any] = {
            PROMPT_TOKENS: [tokens for tokens, _ in members],
            SHOWS_IDS: self.shows_ids,
            FILLS: self.token_limit is None or sampling.max_tokens < self.token_limit,
            FIELDS: self.response_fields,
        }
        names = {path.split("/")[0] for path in self.response_fields}
        if not names or names & {SETTINGS, "prompt"}:
            fields |= {
                SETTINGS: settings_of(sampling, stream=bool(self.stream)),
                PROMPTS: [text for _, text in members],
            }
        return fields


def settings_of(sampling: Sampling, *, stream: bool) -> dict[str, Any]:
    """Parameters of sampling in llama.cpp's names."""
    return {
        "seed": int(sampling.seed or 0),
        "temperature": sampling.temperature,
        "dynatemp_range": sampling.dynatemp_range,
        "dynatemp_exponent": sampling.dynatemp_exponent,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_n_sigma": sampling.top_n_sigma or -1.0,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "typical_p": sampling.typical_p,
        "repeat_last_n": -1,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": sampling.dry_multiplier,
        "dry_base": sampling.dry_base,
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_penalty_last_n,
        "dry_sequence_breakers": sampling.dry_sequence_breakers,
        "mirostat": 0,
        "stop": sampling.stop,
        "max_tokens": sampling.max_tokens,
        "n_predict": sampling.max_tokens,
        "ignore_eos": not sampling.stop_ids,
        "stream": stream,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in sampling.logit_bias.items()],
        "n_probs": sampling.logprobs or 0,
        "grammar": sampling.grammar.text if sampling.grammar is not None else "",
        "samplers": ["penalties", "dry", "top_n_sigma", "temperature", "top_k", "top_p", "min_p", "typ_p", "xtc"],
    }


_PASSED_ON = tuple(
    name
    for name in (*CommonFields.__struct_fields__, "max_tokens", "n", "grammar", "json_schema")
    if name != "logit_bias"
)


def parse_native(body: bytes, warnings: Warnings | None = None) -> NativeCompletion:
    """Decode and check a body; raise RequestError naming the field at fault."""
    request = decode_request(body, NativeRequest, warnings)
    warn_without_effect(request, WITHOUT_EFFECT, warnings)
    if request.post_sampling_probs:
        raise refusal("post_sampling_probs", "Log probabilities are those of the model; leave it out.")
    fields: dict[str, Any] = {name: getattr(request, name) for name in _PASSED_ON}
    biases, texts = _biases(request)
    prompt, mixed = _prompts(request)
    unlimited = request.max_tokens in (None, UNTIL_FULL)
    fields |= {
        "prompt": prompt,
        "mixed_prompts": mixed,
        "max_tokens": UNLIMITED if unlimited else request.max_tokens,
        "logit_bias": biases or None,
        "text_biases": texts,
        "logprobs": request.n_probs or None,
        "response_fields": _paths(request),
        "shows_ids": bool(request.stream or request.return_tokens),
    }
    with naming(_NAMES):
        completion = convert_part(
            {name: value for name, value in fields.items() if value is not None}, NativeCompletion, ""
        )
        check_completion(completion)
    return completion


_MOST_FIELDS = 64
_LONGEST_FIELD = 256


def _paths(request: NativeRequest) -> list[str]:
    paths = request.response_fields or []
    if len(paths) > _MOST_FIELDS or any(len(path) > _LONGEST_FIELD for path in paths):
        raise RequestError(
            f"'response_fields' takes at most {_MOST_FIELDS} paths of up to {_LONGEST_FIELD} characters.",
            param="response_fields",
        )
    return paths


def _prompts(request: NativeRequest) -> tuple[str | list[Any], dict[int, list[int | str]]]:
    """The prompts in OpenAI's form, and those that mix ids and texts, by their places. Raises RequestError."""
    prompt = request.prompt
    if not isinstance(prompt, list):
        return _text(prompt, "prompt"), {}
    row = [entry for entry in prompt if isinstance(entry, (int, str))]
    if any(isinstance(entry, int) for entry in row):
        if len(row) < len(prompt):
            raise RequestError(
                "'prompt' has token ids beside whole prompts; put the ids of each prompt into a list.", param="prompt"
            )
        prompt = [row]
    if len(prompt) > MAX_PARTS:
        raise RequestError(f"'prompt' has {len(prompt)} entries; at most {MAX_PARTS} are served.", param="prompt")
    prompts: list[str | list[int]] = []
    mixed: dict[int, list[int | str]] = {}
    for place, entry in enumerate(prompt):
        if isinstance(entry, list):
            parts = [part for part in entry if part != ""]
            if any(isinstance(part, str) for part in parts):
                mixed[place] = parts
            prompts.append([part for part in parts if isinstance(part, int)] or [0] * bool(parts))
        else:
            assert not isinstance(entry, int)
            prompts.append(_text(entry, f"prompt[{place}]"))
    return prompts, mixed


def _text(prompt: str | PromptText, path: str) -> str:
    if isinstance(prompt, str):
        return prompt
    if prompt.multimodal_data:
        raise refusal(f"{path}.multimodal_data", "Send images to /v1/chat/completions.")
    return prompt.prompt_string


def _biases(request: NativeRequest) -> tuple[dict[str, float], dict[str, float]]:
    """Biases by token id, as JSON has them, and by text. Raises RequestError."""
    biases = request.logit_bias or {}
    pairs: list[list[Any]] = biases if isinstance(biases, list) else [[name, bias] for name, bias in biases.items()]
    if len(pairs) > MAX_BIASES:
        raise RequestError(
            f"'logit_bias' has {len(pairs)} entries; at most {MAX_BIASES} are served.", param="logit_bias"
        )
    ids: dict[str, float] = {}
    texts: dict[str, float] = {}
    for pair in pairs:
        name, bias = pair if len(pair) == 2 else (None, None)
        bias = _NEVER if bias is False else bias
        names_token = isinstance(name, str) or (isinstance(name, int) and not isinstance(name, bool))
        if not names_token or isinstance(bias, bool) or not isinstance(bias, (int, float)):
            raise RequestError(
                "'logit_bias' must be a mapping, or a list of pairs, from a token id or a text to a number or false.",
                param="logit_bias",
            )
        bias = max(RANGES["logit_bias"].least, bias)
        name = str(name)
        if name.isascii() and name.isdigit():
            ids[name] = bias
        elif name:
            texts[name] = bias
    return ids, texts


_INFILL_WITHOUT_EFFECT = {**WITHOUT_EFFECT, "n_probs": "log probabilities are part of /v1/completions and /completion"}
"""Fields that llama.vim and llama.vscode send with each request."""
_INFILL_NAMES = {r"^prompt$": "input_prefix", r"^suffix$": "input_suffix"}


class ContextFile(msgspec.Struct, kw_only=True):
    """A file, or a part of one, that may help to fill the gap."""

    text: str
    filename: str = "tmp"


class InfillRequest(CommonFields, kw_only=True, forbid_unknown_fields=True):
    input_prefix: str
    """The text before the gap."""
    input_suffix: str
    """The text after the gap."""
    input_extra: list[ContextFile] | None = None
    prompt: str | None = None
    """More text before the gap: the line's beginning in llama.vim."""
    max_tokens: int | None = None
    grammar: str | None = None
    json_schema: Any = None
    # Hints without an effect on the answer.
    response_fields: list[str] | None = None
    t_max_prompt_ms: float | None = None
    # Accepted with a warning.
    n_indent: int | None = None
    t_max_predict_ms: float | None = None
    n_probs: int | None = None


class Filling(LlamaCppCompletion, kw_only=True, forbid_unknown_fields=True):
    """The completion of a body of /infill."""

    input_extra: list[ContextFile] = []

    @property
    def has_gap(self) -> bool:
        return True

    @property
    def files(self) -> list[tuple[str, str]]:
        return [(file.filename, file.text) for file in self.input_extra]

    @property
    def names(self) -> Names:
        return _INFILL_NAMES


_INFILL_FIELDS = (*CommonFields.__struct_fields__, "grammar", "json_schema")


def parse_infill(body: bytes, warnings: Warnings | None = None) -> Filling:
    """Decode and check a body; raise RequestError naming the field at fault."""
    request = decode_request(body, InfillRequest, warnings)
    warn_without_effect(request, _INFILL_WITHOUT_EFFECT, warnings)
    files = request.input_extra or []
    if len(files) > MAX_PARTS:
        text = f"'input_extra' has {len(files)} files; at most {MAX_PARTS} are served."
        raise RequestError(text, param="input_extra")
    fields: dict[str, Any] = {name: getattr(request, name) for name in _INFILL_FIELDS}
    fields |= {
        "prompt": request.input_prefix + (request.prompt or ""),
        "suffix": request.input_suffix,
        "max_tokens": UNLIMITED if request.max_tokens == UNTIL_FULL else request.max_tokens,
    }
    completion = {name: value for name, value in fields.items() if value is not None}
    with naming(_INFILL_NAMES):
        filling = convert_part(completion | {"input_extra": files}, Filling, "")
        check_completion(filling)
    return filling


class NativeLogprob(Shape):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class NativeTokenLogprob(NativeLogprob):
    top_logprobs: list[NativeLogprob]


class NativePart(Shape, kw_only=True):
    """A part of a streamed answer."""

    index: int
    content: str
    tokens: list[int]
    stop: Literal[False] = False
    id_slot: int = -1
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[NativeTokenLogprob] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class NativeResult(Shape, kw_only=True):
    """The answer, and the last event of a stream, whose `content` is empty. With `response_fields` it has these alone,
    by their paths."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int = -1
    stop: Literal[True] = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    timings: Timings
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    completion_probabilities: list[NativeTokenLogprob] | UnsetType = UNSET


class AppliedTemplate(msgspec.Struct, kw_only=True):
    prompt: str


class GenerationDefaults(msgspec.Struct, kw_only=True):
    params: dict[str, Any]
    n_ctx: int


class Modalities(msgspec.Struct, kw_only=True):
    vision: bool
    audio: bool = False


class Props(msgspec.Struct, kw_only=True):
    """The facts about a model that clients of llama.cpp read."""

    default_generation_settings: GenerationDefaults
    total_slots: int
    """Requests of a whole context for which there is memory at once."""
    model_alias: str
    model_path: str
    """The model's name: where its files are is not told."""
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool
    endpoint_slots: bool = True
    endpoint_props: bool = False
    endpoint_metrics: bool = True


class NextToken(msgspec.Struct, kw_only=True):
    has_next_token: bool = True
    n_decoded: int


class Slot(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A running request of the caller's tenant, or a place for one."""

    id: int
    n_ctx: int
    is_processing: bool
    speculative: bool
    id_task: str | None = None
    """The request's id."""
    n_prompt_tokens: int | None = None
    next_token: list[NextToken] = []
