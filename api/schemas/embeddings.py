"""The body of POST /v1/embeddings, as the SDKs send it."""

from __future__ import annotations

from typing import Literal

import msgspec


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
