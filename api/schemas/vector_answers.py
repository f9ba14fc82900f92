"""The answers about inputs: vectors, scores, and documents in order."""

from __future__ import annotations

import builtins
from typing import Literal

from msgspec import UNSET, UnsetType

from api.schemas.answers import Shape


class InputUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class Embedding(Shape, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """With `encoding_format: "base64"` the bytes of little-endian float32 numbers."""


class Embeddings(Shape, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: InputUsage


class VectorsByType(Shape):
    float: list[list[builtins.float]]


class ApiVersion(Shape):
    version: Literal["2"] = "2"


class BilledUnits(Shape):
    input_tokens: int


class EmbedMeta(Shape):
    api_version: ApiVersion
    billed_units: BilledUnits


class EmbeddedByType(Shape, kw_only=True):
    """Cohere's form of vectors."""

    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    id: str
    embeddings: VectorsByType
    meta: EmbedMeta


class RankedDocument(Shape):
    text: str


class RankedResult(Shape):
    index: int
    """The document's place in the request."""
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Reranked(Shape):
    id: str
    model: str
    usage: InputUsage
    results: list[RankedResult]
    """From the highest score to the lowest."""


class Score(Shape, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(Shape, kw_only=True):
    id: str
    model: str
    usage: InputUsage
    object: Literal["list"] = "list"
    created: int
    data: list[Score]


class NativeVector(Shape):
    """llama.cpp's form: the only vector of an input in a list."""

    index: int
    embedding: list[list[builtins.float]]


class TextScore(Shape):
    """The form of text-embeddings-inference."""

    index: int
    score: builtins.float
    text: str | UnsetType = UNSET
