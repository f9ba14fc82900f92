"""Decoding of request bodies by msgspec: a wrong type is a 400 that names the field, as the client named it.

Unknown fields inside messages, tools and other nested objects are ignored: their structs don't forbid them. A struct
of a whole body has `forbid_unknown_fields`, and `decode_request` looks at a body a second time only where it has one:
`TABLE` treats the field, or `Warnings.ignore` reports it.

A parser that drops something else of a request calls `warnings.add("what, and why", "param")` on the `Warnings` it was
given (`Caller.warnings`). They become the response's `Warning` header and one log line, and with `--strict` a 400.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
import msgspec.inspect

from control.errors import RequestError

# --- The table of tolerance ------------------------------------------------------------------------------------------

# The treatment of a request's top-level fields that its endpoint does not implement.
#
# A field that alters the answer is honoured or refused by name; any other one is accepted. A name that
# neither a body nor this table has is ignored with a warning. docs/api.md shows the same rows.


@dataclass(frozen=True, slots=True)
class Hint:
    """Accepted without an effect: it can't alter the answer."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """Another name of the first of these fields that the endpoint has."""

    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Warned:
    """Ignored with a warning of its own, unless the value is neutral."""

    text: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Would alter the answer and is not implemented: refused, unless the value is neutral."""

    neutral: tuple[Any, ...] = ()
    remedy: str = "Remove it from the request."


Row = Hint | Mapped | Warned | Refused

_OFF: tuple[Any, ...] = (0, False)
_ONE: tuple[Any, ...] = (1, 0)
_EMPTY: tuple[Any, ...] = ([], {}, "", False)
_BEAMS = "Beam search is not implemented; use 'n' for several answers."
_FORMAT = "Use 'text.format' of /v1/responses or 'output_config.format' of /v1/messages."
_LIMITS = ("max_tokens", "max_output_tokens")

TABLE: dict[str, Row] = {
    # OpenAI's, OpenRouter's and others' names of what only their service has.
    "prediction": Hint(),  # of chat completions: elsewhere nothing is predicted
    **dict.fromkeys(("client_metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), Hint()),
    **dict.fromkeys(("provider", "safety_identifier", "service_tier", "transforms", "usage", "verbosity"), Hint()),
    # vLLM's and SGLang's names of one request, and of its way through their server.
    **dict.fromkeys(("custom_labels", "extra_key", "kv_transfer_params", "request_id", "rid", "session_id"), Hint()),
    **dict.fromkeys(("spaces_between_special_tokens", "stream_interval"), Hint()),
    # llama.cpp's: its slots, its cache and its progress, and numbers that belong to a sampler below.
    **dict.fromkeys(("cache_prompt", "id_slot", "n_cache_reuse", "n_keep", "return_progress"), Hint()),
    **dict.fromkeys(("mirostat_eta", "mirostat_tau"), Hint()),
    # Ollama's options: how its server loads and runs a model.
    **dict.fromkeys(("embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_gpu"), Hint()),
    **dict.fromkeys(("num_keep", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"), Hint()),
    # Neighbours' names of fields that are served.
    "repeat_penalty": Mapped(("repetition_penalty",)),
    "typical": Mapped(("typical_p",)),
    **dict.fromkeys(
        ("thinking_budget", "thinking_budget_tokens", "reasoning_budget_tokens"), Mapped(("thinking_token_budget",))
    ),
    "n_predict": Mapped(_LIMITS),
    "max_new_tokens": Mapped(_LIMITS),
    "max_tokens": Mapped(("max_output_tokens",)),
    "max_completion_tokens": Mapped(_LIMITS),
    "max_output_tokens": Mapped(("max_tokens",)),
    "n_cmpl": Mapped(("n",)),
    "stop_sequences": Mapped(("stop",)),
    "stop": Mapped(("stop_sequences",)),
    "regex": Mapped(("guided_regex",)),
    "ebnf": Mapped(("guided_grammar",)),
    "no_stop_trim": Mapped(("include_stop_str_in_output",)),
    # Ignored, and the client should know.
    "store": Warned(
        "'store' has no effect here: /v1/responses and /v1/chat/completions store their answers.", (False,)
    ),
    "samplers": Warned("'samplers' has no effect: the order of the samplers is fixed.", _EMPTY),  # of llama.vim
    "num_ctx": Warned("'num_ctx' has no effect: a model has the context with which it was loaded."),
    "repeat_last_n": Warned("'repeat_last_n' has no effect: penalties count the whole context.", (-1,)),
    "penalize_newline": Warned("'penalize_newline' has no effect: penalties count line breaks too.", (True,)),
    # llama.cpp's and others' samplers.
    "mirostat": Refused(_OFF),
    "mirostat_mode": Refused(_OFF),
    "smoothing_factor": Refused(_OFF),
    "tfs_z": Refused(_ONE),
    "tfs": Refused(_ONE),
    "top_a": Refused(_OFF),
    "epsilon_cutoff": Refused(_OFF),
    "eta_cutoff": Refused(_OFF),
    "penalty_alpha": Refused(_OFF),
    "guidance_scale": Refused(_ONE),
    "cfg_scale": Refused(_ONE),
    "negative_prompt": Refused(_EMPTY),
    "min_keep": Refused(_OFF),
    "n_indent": Refused(_OFF),
    "n_probs": Refused(_OFF, "Use 'logprobs'."),
    "t_max_predict_ms": Refused(_OFF, "Use 'timeout', in seconds."),
    "response_fields": Refused(_EMPTY),
    "lora": Refused(_EMPTY),
    # vLLM's and SGLang's.
    "use_beam_search": Refused(_OFF, _BEAMS),
    "num_beams": Refused(_ONE, _BEAMS),
    "beam_width": Refused(_ONE, _BEAMS),
    "best_of": Refused(_ONE, "Use 'n' for several answers."),
    "length_penalty": Refused(_ONE),
    "diversity_penalty": Refused(_OFF),
    "no_repeat_ngram_size": Refused(_OFF),
    "logits_processors": Refused(_EMPTY),
    "custom_logit_processor": Refused(_EMPTY),
    "allowed_token_ids": Refused(_EMPTY, "Use /v1/chat/completions or /v1/completions."),
    "logprob_token_ids": Refused(_EMPTY, "Use 'logprobs' and 'top_logprobs'."),
    "truncate_prompt_tokens": Refused((-1,), "Send a shorter prompt."),
    "repetition_detection": Refused(_EMPTY),
    "stop_regex": Refused(_EMPTY, "Use 'stop'."),
    "chat_template": Refused(_EMPTY, "The model's own template is used. Remove it from the request."),
    "documents": Refused(_EMPTY, "Send them as 'chat_template_kwargs.documents' or in a message."),
    "lora_path": Refused(_EMPTY),
    "prompt_embeds": Refused(_EMPTY),
    "input_embeds": Refused(_EMPTY),
    "return_hidden_states": Refused(_OFF),
    "vllm_xargs": Refused(_EMPTY),
    # OpenAI's.
    "modalities": Refused((["text"], [])),
    "audio": Refused(_EMPTY),
    "moderation": Refused(_EMPTY),
    "web_search_options": Refused(),  # {} asks for a search, too
    # Fields of one endpoint that were sent to another one.
    "n": Refused((1,), "Send several requests."),
    "suffix": Refused(_EMPTY, "Use /v1/completions."),
    "logprobs": Refused(_OFF),
    "top_logprobs": Refused(_OFF),
    "presence_penalty": Refused(_OFF),
    "frequency_penalty": Refused(_OFF),
    "response_format": Refused(({"type": "text"}, {}, ""), _FORMAT),
    **dict.fromkeys(
        ("grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex"), Refused(_EMPTY, _FORMAT)
    ),
    **dict.fromkeys(("json_schema", "structured_outputs"), Refused(_EMPTY, _FORMAT)),
    **dict.fromkeys(
        ("function_call", "functions"), Refused(("none", "auto", [], {}), "Use 'tools' and 'tool_choice'.")
    ),
    "system": Refused(_EMPTY, "Send a message with role 'system'."),
    "instructions": Refused(_EMPTY, "Send a message with role 'system'."),
    "previous_response_id": Refused(_EMPTY, "Use /v1/responses."),
    "conversation": Refused(_EMPTY, "Send all messages each time."),
}


def missing(name: str) -> RequestError:
    """The error for a field that is not there."""
    return RequestError(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")


def refusal(name: str, remedy: str = "Remove it from the request.") -> RequestError:
    """The error for a field or a value that is not served."""
    return RequestError(
        f"'{name}' is not supported by this server. {remedy}",
        param=name,
        code="unsupported_parameter",
    )


# Names and texts of one header, and the characters of each: names are as many and as long as the client made them.
_MOST = 8
_LONGEST_NAME = 64
_LONGEST_TEXT = 200
_UNSAFE = re.compile(r"[^ !#-\[\]-~]")
"""Characters that a quoted text in a header can't have: control characters, quotes, backslashes, all beyond ASCII."""


class Warnings:
    """Collects the warnings about one request. With `strict` the first one is a RequestError instead."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._names: list[str] = []
        self._texts: list[str] = []
        self._more = 0

    def ignore(self, field: str) -> None:
        """An unknown field was ignored."""
        if self.strict:
            raise RequestError(
                f"Unrecognized request argument supplied: {field}. Remove it, or see the API reference for what is "
                "served.",
                param=field,
                code="unknown_parameter",
            )
        if len(self._names) < _MOST:
            self._names.append(_safe(field, _LONGEST_NAME))
        else:
            self._more += 1

    def add(self, text: str, param: str | None = None) -> None:
        """A part of the request has no effect; `text` says which and why, `param` names it where it is refused."""
        if self.strict:
            raise RequestError(text, param=param, code="unsupported_parameter")
        if len(self._texts) < _MOST and (safe := _safe(text, _LONGEST_TEXT)) not in self._texts:
            self._texts.append(safe)

    @property
    def texts(self) -> list[str]:
        """All warnings, safe for a header and bounded in number and length."""
        if not self._names:
            return self._texts
        more = f" and {self._more} more" if self._more else ""
        return [f"Unknown fields were ignored: {', '.join(self._names)}{more}.", *self._texts]

    @property
    def headers(self) -> dict[str, str]:
        """The `Warning` header of the response; empty without warnings."""
        texts = self.texts
        return {"warning": ", ".join(f'299 furrow "{text}"' for text in texts)} if texts else {}


def _safe(text: str, longest: int) -> str:
    cut = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return _UNSAFE.sub("?", cut)


Names = dict[str, str]
"""The client's names of a chat request's parameters, whole or as patterns, which begin with ^."""


@contextmanager
def naming(names: Names) -> Generator[None]:
    """A RequestError of the block gets its parameter under the name that the client used."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        error.param = _client_name(param, names) or error.param
        if error.param != param:
            error.args = (str(error).replace(f"'{param}'", f"'{error.param}'"),)
        raise


def _client_name(param: str, names: Names) -> str:
    if param in names:
        return names[param]
    ours = next((ours for ours in names if ours.startswith("^") and re.match(ours, param)), None)
    return param if ours is None else re.sub(ours, names[ours], param)


T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`$")

_STEP = re.compile(r"\.?(\w+)|(\[[^\]]*\])")
_HALF_CHARACTER = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)

_UNKNOWN_CODE = "unknown_parameter"

_BYTE = re.compile(r"\(byte (\d+)\)")
_AROUND = 16
_MOST_WHOLE = 2**53
"""Floats up to this one are exact integers."""
_LONGEST_ERROR = 1000


def decode_body(body: bytes, type_: type[T]) -> T:
    """Decode a JSON body; raise RequestError naming the field at fault in `param`."""
    body = body.removeprefix(codecs.BOM_UTF8)  # some platforms write it in front of all that they write
    if not body.strip():
        raise RequestError("The request has no body; send a JSON object with Content-Type: application/json.")
    try:
        try:
            return msgspec.json.decode(body, type=type_)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            return msgspec.json.decode(msgspec.json.encode(_whole_numbers(msgspec.json.decode(body))), type=type_)
    except msgspec.ValidationError as error:
        raise _explain(error, type_) from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply. Send a flatter one.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if half := _half_character(body, str(error)):
            raise RequestError(
                f"The request body is not valid JSON: {half[0].decode()} is half of a surrogate pair, which is no "
                "character. Send both halves, or the character itself in UTF-8.",
                code="invalid_json",
            ) from None
        what = "it is UTF-16; send UTF-8" if body.startswith(_UTF_16) else str(error)
        raise RequestError(f"The request body is not valid JSON: {what}.", code="invalid_json") from None


def decode_request(body: bytes, type_: type[S], warnings: Warnings | None) -> S:
    """As `decode_body`, for a client's request: unknown fields go to `warnings`; without these they are refused."""
    try:
        return decode_body(body, type_)
    except RequestError as error:
        if error.code != _UNKNOWN_CODE:
            raise
    return decode_body(_known(body, type_, warnings or Warnings(strict=True)), type_)


def _known(body: bytes, type_: type[msgspec.Struct], warnings: Warnings) -> bytes:
    """The body with the fields that its type has. Raises RequestError for a field that is refused."""
    members = decode_body(body, dict[str, msgspec.Raw])
    fields = frozenset(type_.__struct_encode_fields__)
    for name in [name for name in members if name not in fields]:
        value = members.pop(name)
        row = TABLE.get(name)
        if row is None:
            warnings.ignore(name)
        elif isinstance(row, Mapped):
            _rename(members, name, value, next((to for to in row.to if to in fields), None), warnings)
        elif not isinstance(row, Hint) and msgspec.json.decode(value) not in (None, *row.neutral):
            if isinstance(row, Refused):
                raise refusal(name, row.remedy)
            warnings.add(row.text, name)
    return msgspec.json.encode(members)


def _rename(members: dict[str, msgspec.Raw], name: str, value: msgspec.Raw, to: str | None, warnings: Warnings) -> None:
    """Put a value under the endpoint's name for it. Raises RequestError where another value is there already."""
    if to is None:
        warnings.ignore(name)
    elif bytes(value) != b"null":
        if bytes(members.get(to, value)) not in (b"null", bytes(value)):
            raise RequestError(f"'{name}' and '{to}' are both set and differ; send one of them.", param=name)
        members[to] = value


def _whole_numbers(value: Any) -> Any:
    """The value with integers in place of floats without a fraction: 1.0 is an integer in JSON Schema."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _MOST_WHOLE else value
    if isinstance(value, list):
        return [_whole_numbers(one) for one in cast(list[Any], value)]
    if isinstance(value, dict):
        return {name: _whole_numbers(one) for name, one in cast(dict[str, Any], value).items()}
    return value


def _half_character(body: bytes, error: str) -> re.Match[bytes] | None:
    """Half of a surrogate pair at the place where decoding ended."""
    position = _BYTE.search(error)
    place = int(position[1]) if position is not None else len(body)
    return _HALF_CHARACTER.search(body, max(0, place - _AROUND), place + _AROUND)


def convert_part(value: Any, type_: type[T], at: str) -> T:
    """Check one part of a body that was decoded loosely; `at` is its place, as `input[0]`. Raises as `decode_body`."""
    try:
        return msgspec.convert(value, type_, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explain(error, type_, at) from None


def _explain(error: msgspec.ValidationError, type_: type, at: str = "") -> RequestError:
    text = str(error)
    if len(text) > _LONGEST_ERROR:  # it has a member's name, as long as the client made it
        text = f"{text[: _LONGEST_ERROR // 2]}…{text[-_LONGEST_ERROR // 2 :]}"
    match = _PATH.match(text)
    assert match is not None  # the pattern matches any text
    what = match["what"]
    inner = (match["path"] or "").lstrip(".")
    path = _join(at, inner) if inner else at
    if unknown := _UNKNOWN.match(what):
        name = _join(path, unknown["field"])
        return RequestError(
            f"Unrecognized request argument supplied: {name}. Remove it, or see the API reference for what is served.",
            param=name,
            code=_UNKNOWN_CODE,
        )
    if absent := _MISSING.match(what):
        return missing(_join(path, absent["field"]))
    if what.startswith("Invalid enum value"):
        what += f"; use one of {', '.join(repr(value) for value in _choices(type_, inner))}"
    where = f" for '{path}'" if path else ""
    return RequestError(f"Invalid value{where}: {what}.", param=path or None, code="invalid_type")


def _choices(type_: type, path: str) -> list[Any]:
    """The values that the field at `path`, as `messages[0].role`, may have."""
    types = [msgspec.inspect.type_info(type_)]
    for field, _ in _STEP.findall(path):
        types = [inner for outer in types for inner in _inside(outer, field)]
    return [value for kind in types if isinstance(kind, msgspec.inspect.LiteralType) for value in kind.values]


def _inside(outer: msgspec.inspect.Type, field: str) -> list[msgspec.inspect.Type]:
    """The types of the named field, or of an element where there is no name: the members of its union."""
    if isinstance(outer, msgspec.inspect.StructType):
        inner = [member.type for member in outer.fields if member.encode_name == field]
    elif isinstance(outer, msgspec.inspect.ListType) and not field:
        inner = [outer.item_type]
    else:
        inner = []
    return [kind for one in inner for kind in (one.types if isinstance(one, msgspec.inspect.UnionType) else (one,))]


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field
