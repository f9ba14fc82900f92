"""A model as an API process serves it: its assets, and what was made of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import msgspec

from api.asgi.limits import text_bytes
from api.chat.forms import Forms, forms_of
from api.chat.tokens import Vocabulary
from api.images.loading import ImageLoader
from api.models.fill_in_middle import FillInMiddle, fill_in_middle_of
from api.models.grammar import letters
from api.schemas.how import CallFormat
from control.messages import ModelAssets
from control.process import give_back_memory


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    assets: ModelAssets
    vocabulary: Vocabulary
    letters: bytes
    """The part of the vocabulary that a grammar can name."""
    text_bytes: int
    """The size of a body that holds a text of a whole context."""
    forms: Forms
    """How the model writes its reasoning and its calls."""
    gaps: FillInMiddle | None = None
    """How the model fills a gap in a text; None where it can't."""
    images: ImageLoader | None = None
    """None where it takes text only."""
    made_of: bytes = b""
    """The digest of the assets from which all of this was made."""


def serve(
    name: str,
    assets: ModelAssets,
    known: ServedModel | None,
    images: ImageLoader | None,
    tool_parser: CallFormat | None,
) -> ServedModel:
    """The model that `assets` describe. Raises any error of a tokenizer or template that can't be used.

    Parts made of the `known` one are kept where they differ in numbers of an epoch alone: a recovery may find other
    memory for KV tokens, and a large tokenizer takes a second to make, in which no other Python thread runs.
    """
    made_of = _digest(assets)
    if known is not None and known.made_of == made_of:
        return replace(known, assets=_without_tokenizer(assets))
    vocabulary = Vocabulary(assets)
    forms = forms_of(assets.chat_template, vocabulary, tool_parser)
    size = text_bytes(assets.context_length, vocabulary.longest_bytes())
    gaps = fill_in_middle_of(vocabulary)
    named = letters(vocabulary, assets)
    assets = _without_tokenizer(assets)
    give_back_memory()
    loader = images if assets.images is not None else None
    return ServedModel(name, assets, vocabulary, named, size, forms, gaps, loader, made_of)


def _without_tokenizer(assets: ModelAssets) -> ModelAssets:
    """Nothing reads the text of the tokenizer once it is made, and it takes megabytes."""
    return msgspec.structs.replace(assets, tokenizer_json="")


def _digest(assets: ModelAssets) -> bytes:
    """Of all assets but those that a new epoch of the same files may change."""
    others = msgspec.structs.replace(_without_tokenizer(assets), kv_tokens=0, created=0)
    digest = hashlib.sha256(msgspec.json.encode(others))
    digest.update(assets.tokenizer_json.encode())
    return digest.digest()


def remedy(state: str) -> str:
    """The remedy for a model that takes no requests in this state."""
    if state == "failed":
        return "`furrow models list` shows the reason"
    return "it is being taken out of service; use another model"
