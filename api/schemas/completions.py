"""The body of POST /v1/completions."""

from __future__ import annotations

from api.schemas.decoding import Warnings, decode_request, refusal
from api.schemas.generation import MAX_CHOICES, GenerationFields, bound_logprobs, check_number, check_ranges
from control.errors import RequestError

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint; chat has none."""


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    """Text, token ids, or a list of either."""
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None
    """The text after the gap that the model fills; empty: there is no gap."""

    @property
    def token_limit(self) -> int | None:
        if self.unlimited:
            return None
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def logprobs_count(self) -> int | None:
        return self.logprobs

    @property
    def least_tokens(self) -> int:
        return 0 if self.echo or self.prompt_logprobs is not None else 1

    @property
    def prompt_scores(self) -> int | None:
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt. Raises RequestError for an empty one or a list of mixed kinds."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt if self.has_gap else _filled(prompt, "prompt")]
        ids = [item for item in prompt if isinstance(item, int)]
        if ids and len(ids) == len(prompt):
            return [ids]
        if ids or not prompt:
            raise RequestError(
                "'prompt' must be a text, a list of token ids, or a non-empty list of one of the two.", param="prompt"
            )
        many = [item for item in prompt if not isinstance(item, int)]
        return [item if self.has_gap else _filled(item, f"prompt[{index}]") for index, item in enumerate(many)]

    @property
    def has_gap(self) -> bool:
        """True if the model is to fill a gap behind the prompt."""
        return bool(self.suffix)

    @property
    def files(self) -> list[tuple[str, str]]:
        """Name and text of each file of context before a gap."""
        return []


def _filled(prompt: str | list[int], path: str) -> str | list[int]:
    if not prompt:
        raise RequestError(f"'{path}' is empty; send at least one token.", param="prompt")
    return prompt


def parse_completion(body: bytes, warnings: Warnings | None = None) -> CompletionRequest:
    """Decode and check a body; raise RequestError naming the field at fault."""
    request = decode_request(body, CompletionRequest, warnings)
    bound_logprobs(request, warnings)
    check_completion(request)
    return request


def check_completion(request: CompletionRequest) -> None:
    """Raise RequestError naming the field at fault."""
    check_ranges(request)
    if request.has_gap and request.echo:
        raise RequestError("'echo' is not served with 'suffix': the prompt is not all before the answer.", param="echo")
    if request.has_gap and request.truncate_prompt_tokens is not None:
        raise RequestError(
            "'truncate_prompt_tokens' is not served with 'suffix'; texts around a gap are cut to the context anyway.",
            param="truncate_prompt_tokens",
        )
    for name in ("best_of", "logprobs"):
        if (value := getattr(request, name)) is not None:
            check_number(name, value)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise refusal("best_of")
    if len(request.prompts) * (request.n or 1) > MAX_CHOICES:
        raise RequestError(
            f"{len(request.prompts)} prompts with n={request.n or 1} are more than {MAX_CHOICES} choices; "
            "send several requests.",
            param="prompt",
        )
