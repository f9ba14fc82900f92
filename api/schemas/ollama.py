"""Ollama's routes: their bodies, the requests for text and vectors that these stand for, and the answers as they are
encoded, lines of a stream and whole bodies.
"""

from __future__ import annotations

import datetime
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from api.schemas.answers import Shape
from api.schemas.chat import EFFORTS
from api.schemas.completions import CompletionRequest, check_completion
from api.schemas.converted import Converted, converse
from api.schemas.decoding import Names, Warnings, convert_part, decode_request, missing, naming, refusal
from api.schemas.embeddings import EmbeddingRequest, check_inputs
from api.schemas.generation import UNLIMITED, SamplerFields
from api.schemas.image_parts import Parts, chat_content, client_names, image_part, text_part
from api.schemas.view import Endpoint
from control.errors import RequestError

LATEST = ":latest"
"""The tag that Ollama's clients add to a name without one."""


class Options(SamplerFields, kw_only=True, forbid_unknown_fields=True):
    """The options that are honoured. None always means: not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


_CHAT_NAMES = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
"""Chat's names of options that have another one there."""


class ModelFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all requests to a model."""

    model: str | None = None
    options: dict[str, Any] | None = None
    """Those of `Options`, and others."""
    keep_alive: str | int | float | None = None
    """A hint: models stay loaded as the operator says."""
    # Furrow's own.
    priority: Literal["high", "normal", "low"] | None = None
    on_disconnect: str | int | float | None = None
    timeout: float | None = None
    deadline: float | None = None


class TextFields(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of both requests for text."""

    stream: bool | None = None
    """Not given: true."""
    think: bool | str | None = None
    format: str | dict[str, Any] | None = None
    """`json`, or a JSON schema."""
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaCalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(msgspec.Struct, kw_only=True):
    function: OllamaCalledFunction
    id: str | None = None


class OllamaInputMessage(msgspec.Struct, kw_only=True):
    """A message. Its calls, and the results of calls, need no ids: results come in the order of the calls."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    """Each in base64."""
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(TextFields, kw_only=True, forbid_unknown_fields=True):
    messages: list[OllamaInputMessage] | None = None
    """Without any the model is only asked to be ready."""
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(TextFields, kw_only=True, forbid_unknown_fields=True):
    prompt: str | None = None
    """Without one the model is only asked to be ready."""
    suffix: str | None = None
    """The text after the gap that the model fills."""
    system: str | None = None
    images: list[str] | None = None
    """Each in base64."""
    raw: bool | None = None
    """True if the prompt is not put into the model's template."""
    template: str | None = None
    context: list[int] | None = None

    @property
    def has_prompt(self) -> bool:
        return bool(self.prompt or self.suffix or self.images)


class EmbedRequest(ModelFields, kw_only=True, forbid_unknown_fields=True):
    input: str | list[str] | None = None
    """Without any the model is only asked to be ready."""
    truncate: bool | None = None
    dimensions: int | None = None


class EmbeddingsRequest(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """The earlier form, of one text."""

    prompt: str | None = None


class ModelToShow(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str | None = None
    """The earlier name of `model`."""
    verbose: bool | None = None

    @property
    def name_of_model(self) -> str:
        """Raises RequestError where no model is named."""
        name = self.model or self.name
        if not name:
            raise missing("model")
        return name


class ModelToDelete(ModelToShow, kw_only=True):
    pass


class ModelToPull(ModelToShow, kw_only=True):
    stream: bool | None = None
    """Not given: true."""


class RawPrompt(CompletionRequest, kw_only=True, forbid_unknown_fields=True):
    """The completion of a body of /api/generate whose prompt has no template, or a gap; no client sends it."""

    names: Names = {}

    @property
    def token_limit(self) -> int | None:
        """None: up to the model's own end."""
        return None if self.unlimited else self.max_tokens


class OllamaInputs(EmbeddingRequest, kw_only=True, forbid_unknown_fields=True):
    """The inputs of a body of /api/embed or /api/embeddings; no client sends it."""

    endpoint: Endpoint


_OPTION_NAMES: Names = {_CHAT_NAMES.get(name, name): f"options.{name}" for name in Options.__struct_fields__}
_TEXT_NAMES: Names = _OPTION_NAMES | {
    r"^stop\b": "options.stop",
    r"^response_format\b.*": "format",
    "reasoning_effort": "think",
}
_PASSED_ON = ("model", "logprobs", "top_logprobs", "priority", "on_disconnect", "timeout", "deadline")


T = TypeVar("T", bound=TextFields)


def decode_text_request(body: bytes, type_: type[T], warnings: Warnings) -> T:
    """Decode a body. Raises RequestError naming the field at fault, also for a field that is not served."""
    request = decode_request(body, type_, warnings)
    if isinstance(request, GenerateRequest):
        if request.template:
            raise refusal(
                "template", "The model's own template is used. Remove it, or send the finished prompt with 'raw': true."
            )
        if request.context:
            raise refusal("context", "Send the conversation to /api/chat as 'messages'.")
    if isinstance(request.think, str) and request.think not in EFFORTS:
        raise RequestError(
            f"Invalid value for 'think': {request.think[:80]!r}; use true, false or one of "
            f"{', '.join(repr(name) for name in EFFORTS)}.",
            param="think",
        )
    return request


def chat_of(request: OllamaChatRequest, warnings: Warnings) -> Converted:
    """The request as a chat. Raises RequestError in the client's own names."""
    messages = _messages(request.messages or [])
    chat = _text_fields(request, warnings) | {"messages": messages, "tools": request.tools or None}
    return converse(chat, "ollama_chat", {}, client_names(messages) | _TEXT_NAMES)


def generation_of(request: GenerateRequest, *, has_template: bool, warnings: Warnings) -> Converted | RawPrompt:
    """A chat of one question; or a completion, where the prompt is to be taken as it is, there is a gap, or the model
    has no template. Raises RequestError in the client's own names."""
    if request.raw or request.suffix or not has_template:
        return _completion_of(request, warnings)
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": request.system})
    messages.append({"role": "user", "content": _content(request.prompt or "", request.images, "")})
    names = client_names(messages) | {r"^messages\b.*": "prompt"} | _TEXT_NAMES
    return converse(_text_fields(request, warnings) | {"messages": messages}, "ollama_generate", {}, names)


def _completion_of(request: GenerateRequest, warnings: Warnings) -> RawPrompt:
    for name in ("system", "images"):
        if getattr(request, name):
            raise refusal(
                name, "A prompt without a template, or with a gap, is text alone. Remove it from the request."
            )
    fields = _text_fields(request, warnings)
    for name in ("enable_thinking", "reasoning_effort", "include_reasoning"):
        fields.pop(name, None)  # switches of a template
    wants_scores = bool(fields.pop("logprobs"))
    alternatives = fields.pop("top_logprobs") or 0
    fields |= {
        "prompt": request.prompt or "",
        "suffix": request.suffix,
        "logprobs": alternatives if wants_scores else None,
    }
    names = _TEXT_NAMES | {"logprobs": "top_logprobs"}
    present = {name: value for name, value in fields.items() if value is not None}
    with naming(names):
        completion = convert_part(present | {"names": names}, RawPrompt, "")
        check_completion(completion)
    return completion


def _text_fields(request: TextFields, warnings: Warnings) -> dict[str, Any]:
    """Fields of the chat request or the completion, without the prompt."""
    fields = {name: getattr(request, name) for name in _PASSED_ON}
    fields |= _options(request, warnings)
    fields["stream"] = request.stream is not False
    fields["response_format"] = _form(request.format)
    if isinstance(request.think, bool):
        fields["enable_thinking"] = request.think
        fields["include_reasoning"] = None if request.think else False
    else:
        fields["reasoning_effort"] = request.think
    return fields


def _options(request: ModelFields, warnings: Warnings) -> dict[str, Any]:
    """The options in chat's names."""
    with naming({r"^(?=.)": "options."}):
        options = decode_request(msgspec.json.encode(request.options or {}), Options, warnings)
    fields = {_CHAT_NAMES.get(name, name): value for name, value in msgspec.structs.asdict(options).items()}
    if options.num_predict is not None and options.num_predict < 1:
        fields["max_tokens"] = UNLIMITED  # as at Ollama
    return fields


def _form(value: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not value:
        return None
    if value == "json":
        return {"type": "json_object"}
    if isinstance(value, str):
        raise RequestError(f"Invalid value for 'format': {value[:80]!r}; use 'json' or a JSON schema.", param="format")
    return {"type": "json_schema", "json_schema": {"schema": value}}


class _CallIds:
    """Ids for calls and results that come without: a result is that of the oldest call that has none yet."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []
        """Id and function of each call without a result."""
        self._count = 0

    def of_call(self, call: OllamaCall) -> str:
        self._count += 1
        identity = call.id or f"call_{self._count}"
        self._open.append((identity, call.function.name))
        return identity

    def of_result(self, turn: OllamaInputMessage) -> str:
        calls = [call for call in self._open if call[0] == turn.tool_call_id]
        if turn.tool_call_id is None:
            calls = [call for call in self._open if turn.tool_name in (None, call[1])]
        if calls:
            self._open.remove(calls[0])
            return calls[0][0]
        self._count += 1
        return turn.tool_call_id or f"call_{self._count}"


def _messages(turns: list[OllamaInputMessage]) -> list[dict[str, Any]]:
    """Chat's messages."""
    ids = _CallIds()
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        content = _content(turn.content or "", turn.images, f"messages[{index}].")
        message: dict[str, Any] = {"role": turn.role, "content": content}
        if turn.thinking:
            message["reasoning_content"] = turn.thinking
        if turn.tool_calls:
            message["tool_calls"] = [_call(call, ids.of_call(call)) for call in turn.tool_calls]
        if turn.role == "tool":
            message["tool_call_id"] = ids.of_result(turn)
            if turn.tool_name:
                message["name"] = turn.tool_name
        messages.append(message)
    return messages


def _call(call: OllamaCall, identity: str) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.function.arguments).decode()
    return {"id": identity, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _content(text: str, images: list[str] | None, at: str) -> str | Parts:
    """The text, after the images; `at` is the beginning of the field's name."""
    parts = [image_part(_image_url(image), f"{at}images[{index}]") for index, image in enumerate(images or [])]
    return chat_content([*parts, text_part(text)]) if parts else text


def _image_url(image: str) -> str:
    """Base64 as a URL; one with its type in front is taken too. No image is fetched."""
    return image if image[:5].lower() == "data:" else f"data:;base64,{image}"


def embed_of(body: bytes, warnings: Warnings) -> EmbedRequest | OllamaInputs:
    """The inputs of /api/embed; the request itself where it has none. Raises RequestError naming the field at fault."""
    request = decode_request(body, EmbedRequest, warnings)
    if request.truncate:
        warnings.add("'truncate' has no effect: an input beyond the model's context is refused.", "truncate")
    if not request.input:
        return request
    return _inputs(request, request.input, "ollama_embed", warnings, request.dimensions)


def embeddings_of(body: bytes, warnings: Warnings) -> EmbeddingsRequest | OllamaInputs:
    """As `embed_of`, of /api/embeddings."""
    request = decode_request(body, EmbeddingsRequest, warnings)
    if not request.prompt:
        return request
    with naming({"input": "prompt"}):
        return _inputs(request, request.prompt, "ollama_embeddings", warnings)


def _inputs(
    request: ModelFields,
    texts: str | list[str],
    endpoint: Endpoint,
    warnings: Warnings,
    dimensions: int | None = None,
) -> OllamaInputs:
    _options(request, warnings)  # samplers, which no vector has: only wrong types are refused
    inputs = OllamaInputs(
        input=texts if isinstance(texts, str) else [*texts],
        endpoint=endpoint,
        dimensions=dimensions,
        model=request.model,
        priority=request.priority,
        on_disconnect=request.on_disconnect,
        timeout=request.timeout,
        deadline=request.deadline,
    )
    check_inputs(inputs)
    return inputs


Unset = UnsetType


class OllamaFunction(Shape, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(Shape, kw_only=True):
    id: str
    function: OllamaFunction


class OllamaMessage(Shape, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | Unset = UNSET
    tool_calls: list[OllamaToolCall] | Unset = UNSET


class TokenScore(Shape, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenScore] | Unset = UNSET


class TextAnswer(Shape, kw_only=True):
    """A line of a stream, or a whole answer. The last line has the counts, and durations in nanoseconds:
    `load_duration` until the request was queued, `prompt_eval_duration` from there to the first token, `eval_duration`
    the rest."""

    model: str
    created_at: datetime.datetime
    done: bool = False
    logprobs: list[TokenScore] | Unset = UNSET
    done_reason: Literal["stop", "length", "load"] | Unset = UNSET
    total_duration: int | Unset = UNSET
    load_duration: int | Unset = UNSET
    prompt_eval_count: int | Unset = UNSET
    prompt_eval_duration: int | Unset = UNSET
    eval_count: int | Unset = UNSET
    eval_duration: int | Unset = UNSET


class ChatAnswer(TextAnswer, kw_only=True):
    message: OllamaMessage


class GenerateAnswer(TextAnswer, kw_only=True):
    response: str = ""
    thinking: str | Unset = UNSET


class EmbedAnswer(Shape, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class EmbeddingsAnswer(Shape, kw_only=True):
    embedding: list[float]


class ModelDetails(Shape, kw_only=True):
    """Fields that no API process knows are empty."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(Shape, kw_only=True):
    """`digest` changes with the model's name, files and chat template; names of one model have the same."""

    name: str
    model: str
    modified_at: datetime.datetime
    size: int
    """Bytes that its ranks hold now."""
    digest: str
    details: ModelDetails


class OllamaModels(Shape, kw_only=True):
    models: list[ListedModel]


class RunningModel(Shape, kw_only=True):
    name: str
    model: str
    size: int
    """Bytes that its ranks hold."""
    digest: str
    details: ModelDetails
    expires_at: datetime.datetime
    size_vram: int
    """Of these bytes those of GPUs."""
    context_length: int


class RunningModels(Shape, kw_only=True):
    models: list[RunningModel]


class ShownModel(Shape, kw_only=True):
    """`template` is a Jinja template."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: datetime.datetime


class OllamaVersion(Shape, kw_only=True):
    version: str
    """Of Ollama, whose API this is."""
    furrow: str
    """Of this server."""


class PullStatus(Shape, kw_only=True):
    """A line of the progress; the last one has the status `success`."""

    status: str
    total: int | Unset = UNSET
    completed: int | Unset = UNSET
