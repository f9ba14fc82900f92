"""Scored tokens as OpenAI's conversational endpoints show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from api.chat.piece import ScoredToken
from api.chat.tokens import Vocabulary

_json = msgspec.json.Encoder().encode


def finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI shows -9999.0 for a token that could not be chosen."""
    return max(logprob, -9999.0)


def raw(value: Any) -> msgspec.Raw:
    """A value that is encoded once, however often it is shown."""
    return msgspec.Raw(_json(value))


def scored_tokens(vocabulary: Vocabulary, name: Callable[[int], str], tokens: list[ScoredToken]) -> list[msgspec.Raw]:
    """Each token by its name, with its bytes, its log probability and its alternatives, best first; encoded."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": name(token), "logprob": finite(logprob), "bytes": list(vocabulary.token_bytes(token))}

    return [
        raw(
            {
                **one(token.token, token.logprobs.chosen),
                "top_logprobs": [one(other, logprob) for other, logprob in token.logprobs.top],
            }
        )
        for token in tokens
        if token.logprobs is not None  # only a prompt's first token has none, and no prompt is shown here
    ]
