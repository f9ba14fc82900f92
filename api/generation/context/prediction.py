"""The predicted content of a chat's answer, as tokens."""

from __future__ import annotations

from api.generation.context.prompts import SURELY_CHARACTERS, Body
from api.models.served import ServedModel
from api.schemas.chat import ChatRequest


def prediction_of(body: Body, served: ServedModel) -> list[int]:
    """The tokens of the request's prediction, at most a context of them: an answer has no more."""
    predicted = body.predicted if isinstance(body, ChatRequest) else ""
    most = served.assets.context_length
    if not predicted:
        return []
    ids = served.vocabulary.encode_pieces([predicted[: most * SURELY_CHARACTERS]], inside=True)
    return ids[:most]
