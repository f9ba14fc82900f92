"""Fields that the generating endpoints share, their limits, and the form of the answer as one grammar.

The form comes from OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, or llama.cpp's `grammar` and
`json_schema`. A request may use one of them. The size of the body limits the sum of all fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from api.schemas.decoding import Warnings, missing
from control.bounds import RANGES, Range, refusal, shown
from control.errors import RequestError
from control.messages import Grammar

MAX_MODEL_NAME = 512
MAX_MESSAGES = 4_096
MAX_PARTS = 4_096
"""Content parts of all messages together."""
MAX_STOP_CHARACTERS = 1_024
MAX_STOP_IDS = 1_024
MAX_ALLOWED_IDS = 16_384
# Texts at which a repetition that DRY counts ends, and the characters of one.
MAX_BREAKERS = 16
MAX_BREAKER_CHARACTERS = 64
MAX_BIASES = 4_096
# OpenAI's bounds: pairs of metadata, characters of a name, and of a value or another label.
MAX_PAIRS = 16
MAX_PAIR_NAME = 64
MAX_LABEL = 512
# Words, characters of one, and of all together.
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_CHARACTERS = 1_024
MAX_BAD_WORDS_CHARACTERS = 65_536
MAX_BAD_WORD_TOKENS = 16_384
"""Tokens of all spellings of the bad words: they travel with the request, and a leader indexes them."""
MAX_DEPTH = 32
"""Levels of a value whose form is free."""

MAX_CHOICES = int(RANGES["n"].most)
MAX_STOP_STRINGS = 16
UNLIMITED = -1


class SamplerFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters of llama.cpp's samplers, under the same names in all dialects."""

    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    top_n_sigma: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None


SAMPLERS = SamplerFields.__struct_fields__


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: with `include_usage`, each chunk has the counts of its choice so far."""


class CommonFields(SamplerFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of chat completions, completions and responses. None always means: not given."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stream: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    # Additions of other engines.
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    bad_words: list[str] | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    cache_salt: str | None = None
    timings_per_token: bool | None = None
    # Furrow's own.
    lookup: int | None = None
    priority: Literal["high", "normal", "low"] | None = None
    on_disconnect: str | int | float | None = None
    timeout: float | None = None
    deadline: float | None = None
    # Hints without an effect on the answer.
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None


class GenerationFields(CommonFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of chat completions and completions."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    # Additions of other engines.
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    # The form of the answer: at most one of these (`grammar_of`).
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Any = None
    guided_grammar: str | None = None
    json_schema: Any = None
    grammar: str | None = None

    @property
    def stop_strings(self) -> list[str]:
        """Empty strings stop nothing."""
        stops = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        return [text for text in stops if text]

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def unlimited(self) -> bool:
        """True if a limit of -1 asks for all that the context has room for, as at llama.cpp."""
        return self.max_tokens == UNLIMITED

    @property
    def least_tokens(self) -> int:
        """The least `max_tokens`: 0 where the prompt's log probabilities are the answer."""
        return 1 if self.prompt_logprobs is None else 0

    @property
    def prompt_scores(self) -> int | None:
        """None: no log probabilities of the prompt; k: its tokens' and k alternatives."""
        return self.prompt_logprobs


_CHECKED = (
    *("temperature", "top_p", "min_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty", "n"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "seed", "top_logprobs", "prompt_logprobs"),
    *("typical_p", "lookup", "thinking_token_budget", "timeout", "deadline", "truncate_prompt_tokens"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "xtc_probability", "xtc_threshold"),
    *("top_n_sigma", "dynatemp_range", "dynatemp_exponent"),
)


def bound_logprobs(request: GenerationFields, warnings: Warnings | None) -> None:
    """Serve -1, vLLM's word for the whole vocabulary, as the most alternatives that are shown."""
    for name in ("top_logprobs", "prompt_logprobs"):
        if getattr(request, name, None) != UNLIMITED:
            continue
        most = int(RANGES[name].most)
        if warnings is not None:
            warnings.add(f"'{name}' -1 shows the {most} most likely tokens, not the whole vocabulary.", name)
        setattr(request, name, most)


def check_ranges(request: GenerationFields) -> None:
    """Raise RequestError for the first value out of its range; the message names value and range."""
    for name in _CHECKED:
        value = getattr(request, name, None)
        if value is None:
            continue
        allowed = RANGES[name]
        if name in ("max_tokens", "max_completion_tokens"):
            if value == UNLIMITED:
                continue
            allowed = Range(request.least_tokens, allowed.most)
        check_number(name, value, allowed)
    for token, bias in (request.logit_bias or {}).items():
        if not RANGES["logit_bias"].holds(bias):
            raise RequestError(
                f"Invalid value for 'logit_bias': {shown(bias)} for token {shown(token)} must be "
                f"{RANGES['logit_bias']}.",
                param="logit_bias",
            )
    _check_lengths(request)
    _check_stop(request.stop_strings)
    _check_labels(request)
    _check_shown(request)
    if request.stream_options is not None and not request.stream:
        raise RequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")


def _check_lengths(request: Any) -> None:
    """Raise RequestError for the first field of a generating request that holds too much."""
    _check_length("model", request.model, MAX_MODEL_NAME, "characters")
    messages: list[Any] = getattr(request, "messages", None) or []
    _check_length("messages", messages, MAX_MESSAGES, "messages")
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if parts > MAX_PARTS:
        raise _too_much("messages", parts, MAX_PARTS, "content parts")
    for index, text in enumerate(request.stop_strings):
        _check_length(f"stop[{index}]", text, MAX_STOP_CHARACTERS, "characters")
    _check_length("stop_token_ids", request.stop_token_ids, MAX_STOP_IDS, "ids")
    _check_length("allowed_token_ids", request.allowed_token_ids, MAX_ALLOWED_IDS, "ids")
    breakers = request.dry_sequence_breakers or []
    _check_length("dry_sequence_breakers", breakers, MAX_BREAKERS, "texts")
    for index, text in enumerate(breakers):
        _check_length(f"dry_sequence_breakers[{index}]", text, MAX_BREAKER_CHARACTERS, "characters")
        if not text:
            raise RequestError(
                f"'dry_sequence_breakers[{index}]' is empty; remove it.", param=f"dry_sequence_breakers[{index}]"
            )
    _check_length("logit_bias", request.logit_bias, MAX_BIASES, "tokens")
    _check_bad_words(request.bad_words or [])
    variables = getattr(request, "chat_template_kwargs", None)
    if variables is not None and deeper(variables, MAX_DEPTH):
        raise RequestError(
            f"'chat_template_kwargs' nests more than {MAX_DEPTH} levels deep; send a flatter value.",
            param="chat_template_kwargs",
        )


def _check_bad_words(words: list[str]) -> None:
    _check_length("bad_words", words, MAX_BAD_WORDS, "words")
    for index, word in enumerate(words):
        _check_length(f"bad_words[{index}]", word, MAX_BAD_WORD_CHARACTERS, "characters")
        if not word:
            raise RequestError(f"'bad_words[{index}]' is empty; remove it.", param=f"bad_words[{index}]")
    if (characters := sum(len(word) for word in words)) > MAX_BAD_WORDS_CHARACTERS:
        raise _too_much("bad_words", characters, MAX_BAD_WORDS_CHARACTERS, "characters in all words")


def check_bad_word_tokens(sequences: list[list[int]]) -> None:
    """Raise RequestError where the spellings of the bad words have too many tokens."""
    if (tokens := sum(len(sequence) for sequence in sequences)) > MAX_BAD_WORD_TOKENS:
        raise _too_much("bad_words", tokens, MAX_BAD_WORD_TOKENS, "tokens in all spellings of the words")


def check_number(name: str, value: float, allowed: Range | None = None) -> None:
    """Raise RequestError where `value` is out of the range of `name` (or of `allowed`), naming all three."""
    if (text := refusal(name, value, allowed)) is not None:
        raise RequestError(text, param=name)


def _check_length(name: str, value: Any, most: int, unit: str) -> None:
    if value is not None and len(value) > most:
        raise _too_much(name, len(value), most, unit)


def _too_much(name: str, count: int, most: int, unit: str) -> RequestError:
    return RequestError(f"'{name}' has {count} {unit}; at most {most} are served.", param=name)


def deeper(value: Any, levels: int) -> bool:
    """True if lists and objects nest more than `levels` deep; looks no deeper than that."""
    if not isinstance(value, (dict, list)):
        return False
    inner = cast("list[Any]", value.values() if isinstance(value, dict) else value)
    return levels == 0 or any(deeper(element, levels - 1) for element in inner)


def _check_labels(request: GenerationFields) -> None:
    """OpenAI's bounds on labels."""
    check_labels(request.metadata or {})
    for name in ("user", "cache_salt"):
        if len(getattr(request, name) or "") > MAX_LABEL:
            raise RequestError(f"'{name}' takes at most {MAX_LABEL} characters.", param=name)


def check_labels(metadata: dict[str, str]) -> None:
    """Raise RequestError for metadata beyond OpenAI's bounds."""
    long = any(len(key) > MAX_PAIR_NAME or len(value) > MAX_LABEL for key, value in metadata.items())
    if len(metadata) > MAX_PAIRS or long:
        raise RequestError(
            f"'metadata' takes at most {MAX_PAIRS} pairs, with keys of up to {MAX_PAIR_NAME} and values of up to "
            f"{MAX_LABEL} characters.",
            param="metadata",
        )


def _check_shown(request: GenerationFields) -> None:
    """Fields that exclude each other."""
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError(
            "'prompt_logprobs' is not served with 'stream'; a completion with 'echo' and 'logprobs' streams them.",
            param="prompt_logprobs",
        )
    if request.truncate_prompt_tokens == 0:
        raise RequestError(
            "Invalid value for 'truncate_prompt_tokens': 0 would leave no prompt; send -1 for what the context holds, "
            "or the number of tokens that stay.",
            param="truncate_prompt_tokens",
        )
    if request.allowed_token_ids is not None and not request.allowed_token_ids:
        raise RequestError(
            "'allowed_token_ids' is empty: no token could follow. Name some, or leave it out.",
            param="allowed_token_ids",
        )
    if request.skip_special_tokens is False and request.stop_strings:
        raise RequestError(
            "'skip_special_tokens: false' is not served with 'stop', which is looked for in text without such tokens; "
            "use 'stop_token_ids'.",
            param="skip_special_tokens",
        )


def _check_stop(stop: list[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"'stop' has {len(stop)} strings; at most {MAX_STOP_STRINGS} are served.", param="stop")


MAX_SCHEMA_DEPTH = 100
"""Levels of a schema; the library's own limit is a little above."""


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """A grammar, and the parameter that named it."""

    grammar: Grammar
    param: str


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's; `schema` beside `json_object` is llama.cpp's, `value` and the types `json` and `regex` are those of
    huggingface_hub. Other fields of neighbours would change the answer."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    value: Any = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's; exactly one field is given."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def grammar_of(request: GenerationFields) -> RequestedGrammar | None:
    """The grammar of the answers; None for free text. Raises RequestError, also for two parameters at once."""
    constraints = [
        constraint
        for name, read in _READERS.items()
        if getattr(request, name) not in (None, "", {}, [])
        and (constraint := read(getattr(request, name), name)) is not None
    ]
    # Clients send one grammar under two names for servers of two ages.
    distinct = {constraint.grammar: constraint for constraint in reversed(constraints)}
    only_one([constraint.param for constraint in reversed(distinct.values())])
    return constraints[0] if constraints else None


def only_one(params: list[str]) -> None:
    """Raise RequestError where several parameters constrain the answer, naming them."""
    if len(params) > 1:
        names = " and ".join(f"'{name}'" for name in params)
        raise RequestError(f"{names} both constrain the answer; send one of them.", param=params[1])


def _response_format(value: Any, param: str) -> RequestedGrammar | None:
    form = _decoded(value, ResponseFormat, param)
    match form.type:
        case "text":
            return None
        case "json_object" | "json" if form.value is not None:
            if form.schema is not None:
                raise RequestError(
                    f"'{param}' has both 'schema' and 'value'; send one of them.", param=f"{param}.value"
                )
            return _json(form.value, f"{param}.value")
        case "json_object" if form.schema is None:
            return RequestedGrammar(Grammar("json_object"), param)
        case "json_object":
            return RequestedGrammar(_schema(form.schema, False, f"{param}.schema"), f"{param}.schema")
        case "json":
            raise missing(f"{param}.value")
        case "regex":
            if form.value is None:
                raise missing(f"{param}.value")
            return _regex(form.value, f"{param}.value")
        case "json_schema":
            here = f"{param}.json_schema"
            if form.json_schema is None:
                raise missing(here)
            if form.json_schema.schema is None:
                raise missing(f"{here}.schema")
            return RequestedGrammar(
                _schema(form.json_schema.schema, bool(form.json_schema.strict), f"{here}.schema"), f"{here}.schema"
            )
        case unknown:
            raise RequestError(
                f"Invalid value for '{param}.type': {unknown!r}; use 'text', 'json_object' or 'json_schema'.",
                param=f"{param}.type",
            )


def _structured_outputs(value: Any, param: str) -> RequestedGrammar | None:
    outputs = _decoded(value, StructuredOutputs, param)
    names = [name for name in StructuredOutputs.__struct_fields__ if getattr(outputs, name) not in (None, False)]
    only_one([f"{param}.{name}" for name in names])
    if not names:
        return None
    if outputs.json_object:
        return RequestedGrammar(Grammar("json_object"), f"{param}.json_object")
    return _READERS_WITHIN[names[0]](getattr(outputs, names[0]), f"{param}.{names[0]}")


def _json(value: Any, param: str) -> RequestedGrammar:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"'{param}' is not valid JSON: {error}.", param=param) from None
    if not isinstance(value, dict):
        raise RequestError(f"'{param}' must be a JSON schema: an object, or its text.", param=param)
    return RequestedGrammar(_schema(value, False, param), param)  # type: ignore[arg-type]


def _regex(value: Any, param: str) -> RequestedGrammar:
    return RequestedGrammar(Grammar("regex", _text(value, param)), param)


def _grammar(value: Any, param: str) -> RequestedGrammar:
    return RequestedGrammar(Grammar("lark", _text(value, param)), param)


def _choice(value: Any, param: str) -> RequestedGrammar:
    texts = _decoded(value, list[str], param)
    if not texts or not all(texts):
        raise RequestError(f"'{param}' must be a list of one text or more, none of them empty.", param=param)
    return RequestedGrammar(Grammar("choice", msgspec.json.encode(texts).decode()), param)


_READERS: dict[str, Callable[[Any, str], RequestedGrammar | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _json,
    "grammar": _grammar,
}
_READERS_WITHIN = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar}


def _schema(schema: dict[str, Any], strict: bool, param: str) -> Grammar:
    """A grammar of the schema. Without `strict` a `oneOf` whose parts may overlap is served as `anyOf`."""
    if deeper(schema, MAX_SCHEMA_DEPTH):
        raise RequestError(
            f"'{param}' is nested more than {MAX_SCHEMA_DEPTH} levels deep; use '$defs' and '$ref' to flatten it.",
            param=param,
            code="invalid_grammar",
        )
    if not strict:
        own = schema.get("x-guidance")
        schema = schema | {"x-guidance": {"coerce_one_of": True} | (own if isinstance(own, dict) else {})}  # type: ignore[operator]
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _decoded(value: Any, kind: Any, param: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        where = param + place.rstrip("`")
        raise RequestError(f"Invalid value for '{where}': {problem}.", param=where, code="invalid_type") from None


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"'{param}' must be a text.", param=param, code="invalid_type")
    return value
