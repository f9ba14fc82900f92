"""The predicted content of a chat's answer, as tokens."""

from __future__ import annotations

from api.chat.tokens import SURELY_CHARACTERS, WHOLE_CHARACTERS
from api.generation.context.prompts import Body
from api.models.served import ServedModel
from api.schemas.chat import ChatRequest


def prediction_of(body: Body, served: ServedModel) -> list[int]:
    """The tokens of the request's prediction, at most a context of them, as an answer has no more, and of at most a
    mebibyte of text."""
    predicted = body.predicted if isinstance(body, ChatRequest) else ""
    most = served.assets.context_length
    if not predicted:
        return []
    read = predicted[: min(most * SURELY_CHARACTERS, WHOLE_CHARACTERS)]
    ids = served.vocabulary.encode_pieces([read], inside=True)
    return ids[:most]
