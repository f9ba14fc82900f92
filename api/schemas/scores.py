"""Scored tokens as OpenAI's newer endpoints show them."""

from __future__ import annotations

from typing import Any

from api.chat.piece import ScoredToken
from api.chat.tokens import Vocabulary


def scored_tokens(vocabulary: Vocabulary, tokens: list[ScoredToken]) -> list[dict[str, Any]]:
    """Each token with its bytes, its log probability and its alternatives, best first."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = list(vocabulary.token_bytes(token))
        # JSON has no infinity: OpenAI shows -9999.0 for a token that could not be chosen.
        return {"token": vocabulary.token_text(token), "logprob": max(logprob, -9999.0), "bytes": raw}

    return [
        {
            **one(token.token, token.logprobs.chosen),
            "top_logprobs": [one(other, logprob) for other, logprob in token.logprobs.top],
        }
        for token in tokens
        if token.logprobs is not None
    ]
