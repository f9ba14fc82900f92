"""Fields that several endpoints share, and the checks on their ranges."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from api.schemas.bounds import MAX_LABEL, MAX_PAIR_NAME, MAX_PAIRS, check_bounds, check_number
from control.errors import RequestError
from control.requests.bounds import RANGES, Range, shown

MAX_CHOICES = int(RANGES["n"].most)
MAX_STOP_STRINGS = 16
UNLIMITED = -1


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: with `include_usage`, each chunk has the counts of its choice so far."""


class CommonFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
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
    cache_salt: str | None = None
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
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    # The form of the answer: at most one of these (see structured.py).
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
        given = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        return [text for text in given if text]

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
    *("typical_p", "lookup", "thinking_token_budget", "timeout", "deadline"),
)


def check_ranges(request: GenerationFields) -> None:
    """Raise RequestError for the first value out of its range; the message names value and range."""
    for name in _CHECKED:
        value = getattr(request, name, None)
        if value is None:
            continue
        known = RANGES[name]
        if name in ("max_tokens", "max_completion_tokens"):
            if value == UNLIMITED:
                continue
            known = Range(request.least_tokens, known.most)
        check_number(name, value, known)
    for token, bias in (request.logit_bias or {}).items():
        if not RANGES["logit_bias"].holds(bias):
            raise RequestError(
                f"Invalid value for 'logit_bias': {shown(bias)} for token {shown(token)} must be "
                f"{RANGES['logit_bias']}.",
                param="logit_bias",
            )
    check_bounds(request)
    _check_stop(request.stop_strings)
    _check_labels(request)
    _check_shown(request)
    if request.stream_options is not None and not request.stream:
        raise RequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")


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
    if request.skip_special_tokens is False and request.stop_strings:
        raise RequestError(
            "'skip_special_tokens: false' is not served with 'stop', which is looked for in text without such tokens; "
            "use 'stop_token_ids'.",
            param="skip_special_tokens",
        )


def _check_stop(stop: list[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"'stop' has {len(stop)} strings; at most {MAX_STOP_STRINGS} are served.", param="stop")
