"""The view of a request, kept in its hash: enough for any API process to render its answer."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from control.errors import RequestError

CallFormat = str
"""The name of a form in the table of `api.chat.reading`, or OWN for a model's own response template."""
OWN = "own"


class ThinkingMarks(msgspec.Struct, frozen=True, omit_defaults=True):
    """The marks around a model's reasoning."""

    open: str = "<think>"
    close: str = "</think>"
    begun: bool = False
    """True if the prompt ends inside the reasoning: the answer begins with it and has no opening mark."""
    continued: bool = False
    """True if the prompt ends with a part of the reasoning itself."""
    hidden: bool = False
    """True if the client does not want to see it."""


class Calling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The format of the model's calls, and facts about the tools."""

    format: CallFormat
    names: list[str] = []
    literal: dict[str, list[str]] = {}
    """For formats without types: each function's parameters that are JSON; the others are text."""
    single: bool = False
    """True if only the first call counts (`parallel_tool_calls: false`)."""
    named: bool = False
    """True if the client named the function; then the end is "stop", as at OpenAI."""
    continued: bool = False
    """True if the prompt ends with a part of the answer."""
    begun: str = ""
    """The beginning of a call that stands at the end of the prompt: it is shown again, as a part of the call."""


class Reading(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parts of an answer besides text."""

    thinking: ThinkingMarks | None = None
    calling: Calling | None = None
    marks: dict[int, str] = {}
    """Special tokens, by id, that the parsers must see though their text is never shown."""
    form: CallFormat = ""
    """The form of a text that has more than calls and reasoning in it, such as channels."""
    own: Any = None
    """The response template of a model that has its own."""
    prompted: str = ""
    """The beginning of the answer's first mark that stands at the end of the prompt."""
    hidden: bool = False
    """True if the client does not want to see reasoning."""


SEALED = "reasoning.encrypted_content"
"""A value of `include` in `View.extra_fields`: reasoning is sealed."""
COMPACTION = "compaction"
"""Of `View.extra_fields`, where the answer is a summary: what stands beside it in a compacted conversation, None in a
response."""

Endpoint = Literal[
    "chat",
    "completions",
    "infill",
    "completion",
    "responses",
    "messages",
    "embeddings",
    "embed",
    "rerank",
    "score",
    "embedding",
    "tei_embed",
    "tei_rerank",
    "ollama_chat",
    "ollama_generate",
    "ollama_embed",
    "ollama_embeddings",
]


class View(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form in which a request's tokens are shown. Written once at enqueue, as JSON text, in the field `view`."""

    endpoint: Endpoint
    created: int
    """Unix seconds; the same in every chunk."""
    received_ms: int = 0
    """The time at which the request came, in Unix milliseconds."""
    timed: bool = False
    """True if the answer, and each of its parts, has llama.cpp's `timings`."""
    model: str
    """The name that the client used, or the model's own where it gave none."""
    n: int = 1
    members: int = 1
    """A completion with a list of k prompts is k requests that are answered as one."""
    member: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """True if every chunk has the counts of its choice so far."""
    logprobs: int | None = None
    stop: list[str] = []
    stop_ids: list[int] = []
    min_tokens: int = 0
    echo: list[str] = []
    """The prompt's text before each answer, by member; only in the first member's view."""
    shown_first: str = ""
    """The assistant's message that a chat's answer follows, where it is shown before each choice."""
    functions: bool = False
    """True if a chat's call is shown as `function_call`, OpenAI's older form."""
    prompt_logprobs: int | None = None
    include_stop: bool = False
    special_tokens: bool = False
    token_ids: bool = False
    """True if tokens are shown as `token_id:<id>`."""
    return_ids: bool = False
    """True if the ids of prompt and answer are shown beside the text."""
    prompt_ids: list[list[int]] = []
    """The prompt's ids by member, where they are shown; only in the first member's view."""
    predicted: int = 0
    """Tokens of the request's prediction."""
    reading: Reading | None = None
    """The parts of the answer besides text; None for a plain completion."""
    user: str | None = None
    metadata: dict[str, str] = {}
    client_request_id: str | None = None
    extra_fields: dict[str, Any] = msgspec.field(default_factory=dict[str, Any], name="told")
    """Fields of the request that the endpoint repeats, or needs for its answer."""

    @property
    def sealed(self) -> bool:
        """True if a text of the answer is sealed."""
        return COMPACTION in self.extra_fields or SEALED in self.extra_fields.get("include", ())

    def echo_of(self, member: int) -> str:
        """The prompt's text that comes before each of a member's choices."""
        return self.echo[member] if self.echo else ""

    def opening(self, member: int) -> str:
        """The same, where it comes at once; with log probabilities it comes as these do."""
        return self.shown_first or (self.echo_of(member) if self.logprobs is None else "")

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


decode_view = msgspec.json.Decoder(View).decode


def answer_id(rid: str, view: View) -> str:
    """The `id` of the response, equal in all its chunks and after a resume."""
    return _ID_BEGINS[view.endpoint] + rid


_ID_BEGINS: dict[Endpoint, str] = {
    "chat": "chatcmpl-",
    "completions": "cmpl-",
    "infill": "cmpl-",
    "completion": "cmpl-",
    "responses": "resp_",
    "messages": "msg_",
    "embeddings": "embd-",
    "embed": "embd-",
    "rerank": "rerank-",
    "score": "score-",
    "embedding": "embd-",
    "tei_embed": "embd-",
    "tei_rerank": "rerank-",
    "ollama_chat": "chat-",
    "ollama_generate": "generate-",
    "ollama_embed": "embed-",
    "ollama_embeddings": "embeddings-",
}


class StreamCursor(msgspec.Struct):
    """A place in a stream: for each member (seq, part), everything up to and including it was sent.

    As text, `<rid>:<seq>.<part>`, with further members' places after commas; it is the `id` of a server-sent event.
    """

    rid: str
    places: list[tuple[int, int]]

    def encode(self) -> bytes:
        if len(self.places) == 1:  # most, and there is one for each token
            return "{}:{}.{}".format(self.rid, *self.places[0]).encode()
        places = ",".join(f"{seq}.{part}" for seq, part in self.places)
        return f"{self.rid}:{places}".encode()


def parse_cursor(text: str) -> StreamCursor:
    """Read a Last-Event-ID. Raises RequestError for a text that no stream of this server sent."""
    rid, _, rest = text.strip().rpartition(":")
    try:
        places = [_place(item) for item in rest.split(",")]
    except ValueError:
        places = []
    if not rid or not places:
        raise RequestError(
            f"Last-Event-ID {text[:80]!r} is not an event id of this server (`<request>:<seq>.<part>`).",
            param="last-event-id",
            code="invalid_event_id",
        )
    return StreamCursor(rid, places)


def _place(item: str) -> tuple[int, int]:
    seq, _, part = item.partition(".")
    if not (seq.isascii() and seq.isdigit() and part.isascii() and part.isdigit()):
        raise ValueError(item)
    return int(seq), int(part)
