"""Scored tokens as OpenAI's conversational endpoints show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from api.chat.piece import ScoredToken
from api.chat.tokens import Vocabulary


def finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI shows -9999.0 for a token that could not be chosen."""
    return max(logprob, -9999.0)


def scored_tokens(
    vocabulary: Vocabulary, name: Callable[[int], str], tokens: list[ScoredToken]
) -> list[dict[str, Any]]:
    """Each token by its name, with its bytes, its log probability and its alternatives, best first."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": name(token), "logprob": finite(logprob), "bytes": list(vocabulary.token_bytes(token))}

    return [
        {
            **one(token.token, token.logprobs.chosen),
            "top_logprobs": [one(other, logprob) for other, logprob in token.logprobs.top],
        }
        for token in tokens
        if token.logprobs is not None  # only a prompt's first token has none, and no prompt is shown here
    ]
