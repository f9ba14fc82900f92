"""Resolution of a request against its model: sampling parameters with every default filled in, lengths checked.

Defaults: the request, then the model's generation_config.json, then OpenAI's.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from api.schemas.chat import ChatRequest
from api.schemas.completions import CompletionRequest
from control.errors import ContextLengthExceeded, RequestError, RequestTooLarge
from control.messages import GenerationRequest, Grammar, ModelAssets, ReasoningBudget, Sampling

_ANY_SEED = -1
"""As at vLLM and llama.cpp: no seed."""
_LEAST_TOP_P = 1e-6
"""top_p 0 is allowed by OpenAI and keeps the most likely token alone; filters need a value above 0."""


def admit(
    request: ChatRequest | CompletionRequest,
    prompt: list[int],
    assets: ModelAssets,
    grammar: Grammar | None = None,
    *,
    bad_words: Sequence[list[int]] = (),
    reasoning: ReasoningBudget | None = None,
    stop_ids: Sequence[int] = (),
    prediction: Sequence[int] = (),
    strict: bool = False,
) -> GenerationRequest:
    """Check a tokenised prompt against the model's limits and fill in the sampling parameters.

    `bad_words` are the token sequences that spell the request's bad words, `stop_ids` more tokens that end the answer,
    `prediction` those that it may repeat.

    A limit of tokens beyond what is left of the context and of the memory is cut to that, or refused if `strict`.

    Raises ContextLengthExceeded, RequestTooLarge, or RequestError for token ids outside the vocabulary.
    """
    if not prompt:
        raise RequestError("The prompt is empty; send at least one token.", param=_prompt_param(request))
    _check_ids("prompt", prompt, assets)
    _check_ids("logit_bias", list(request.logit_bias or {}), assets)
    _check_ids("stop_token_ids", request.stop_token_ids or [], assets)
    max_tokens = _max_tokens(request, len(prompt), assets, strict)
    if request.min_tokens is not None and request.min_tokens > max_tokens:
        raise RequestError(
            f"'min_tokens' ({request.min_tokens}) is above the most tokens that can be generated ({max_tokens}).",
            param="min_tokens",
        )
    sampling = _sampling(request, max_tokens, assets)
    sampling = msgspec.structs.replace(
        sampling,
        grammar=grammar,
        bad_words=list(bad_words),
        reasoning=reasoning,
        stop_ids=sorted({*sampling.stop_ids, *stop_ids}),
        prediction=list(prediction),
    )
    return GenerationRequest(prompt=prompt, sampling=sampling, cache_salt=request.cache_salt or "")


def _prompt_param(request: ChatRequest | CompletionRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _limit_param(request: ChatRequest | CompletionRequest) -> str:
    newer = isinstance(request, ChatRequest) and request.max_completion_tokens is not None
    return "max_completion_tokens" if newer else "max_tokens"


def _check_ids(param: str, ids: list[int], assets: ModelAssets) -> None:
    wrong = next((token for token in ids if not 0 <= token < assets.vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"'{param}' has token id {wrong}; this model's ids are 0 to {assets.vocab_size - 1}.", param=param
        )


def _max_tokens(request: ChatRequest | CompletionRequest, prompt_tokens: int, assets: ModelAssets, strict: bool) -> int:
    """The request's limit, else the model's default, else the rest of the context (and of the memory)."""
    rest, limit = min(assets.context_length, assets.kv_tokens) - prompt_tokens, request.token_limit
    needed = limit if strict and limit is not None else 1
    if prompt_tokens + needed > assets.context_length:
        error = ContextLengthExceeded(prompt_tokens, limit or 1, assets.context_length)
        error.param = _limit_param(request) if needed > assets.context_length else _prompt_param(request)
        raise error
    if prompt_tokens + needed > assets.kv_tokens:
        raise RequestTooLarge(
            f"The request needs memory for {prompt_tokens + needed} tokens ({prompt_tokens} in the prompt); this "
            f"deployment holds {assets.kv_tokens}. Shorten the prompt or lower max_tokens.",
            param=_limit_param(request) if needed > 1 else _prompt_param(request),
        )
    if limit is not None or request.unlimited:
        return rest if limit is None else min(limit, rest)
    default = _default_max_tokens(assets.generation_config, prompt_tokens)
    return rest if default is None else min(rest, max(default, request.min_tokens or 0))


def _default_max_tokens(config: dict[str, Any], prompt_tokens: int) -> int | None:
    """The cap of generation_config.json: `max_new_tokens`, else `max_length`, which counts the prompt. None: no cap."""
    cap = _positive(config.get("max_new_tokens"))
    if cap is None:
        length = _positive(config.get("max_length"))
        cap = _positive(length - prompt_tokens) if length is not None else None
    return cap


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _sampling(request: ChatRequest | CompletionRequest, max_tokens: int, assets: ModelAssets) -> Sampling:
    config = assets.generation_config
    top_k = _default(request.top_k, config, "top_k", 0)
    eos_ids = [] if request.ignore_eos else assets.eos_ids
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=float(_default(request.temperature, config, "temperature", 1.0)),
        top_p=max(_LEAST_TOP_P, float(_default(request.top_p, config, "top_p", 1.0))),
        top_k=max(0, int(top_k)),
        min_p=float(_default(request.min_p, config, "min_p", 0.0)),
        typical_p=float(_default(request.typical_p, config, "typical_p", 1.0)),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=float(_default(request.repetition_penalty, config, "repetition_penalty", 1.0)),
        logit_bias=request.logit_bias or {},
        # Drawn here where the client gives none, so that a request that Redis loses can be brought back unchanged.
        seed=str(secrets.randbits(64) if request.seed in (None, _ANY_SEED) else request.seed % 2**64),
        stop=request.stop_strings,
        stop_ids=sorted({*eos_ids, *(request.stop_token_ids or [])}),
        logprobs=request.logprobs_count,
        prompt_logprobs=request.prompt_scores,
        n=request.n or 1,
        lookup=request.lookup,
    )


def _default(requested: Any, config: dict[str, Any], name: str, otherwise: float) -> Any:
    if requested is not None:
        return requested
    value = config.get(name)
    return otherwise if value is None else value
