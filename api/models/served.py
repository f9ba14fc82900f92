"""A model as an API process serves it: its assets, and what was made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import structlog

from api.asgi.bodies import text_bytes
from api.asgi.turns import off_loop
from api.chat.forms import Forms, forms_of
from api.chat.metered import NeedsProcess
from api.chat.template import SHIPPED, MeteredTemplate, PlainTemplate, Template
from api.chat.tokens import Vocabulary
from api.images.loading import ImageLoader
from api.models.confined import ConfinedFiles, Report
from api.models.fill_in_middle import FillInMiddle, fill_in_middle_of
from api.models.grammar import letters
from api.models.model_process import Files
from api.schemas.view import CallFormat
from control.errors import ModelFileRefused
from control.messages import ModelAssets
from control.process import give_back_memory
from control.text.tokenizer_check import MOST_TOKEN_BYTES, judge

log = structlog.stdlib.get_logger(__name__)

T = TypeVar("T")


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
    template: Template | None = None
    confined: ConfinedFiles | None = None
    """The process of the template and the tokenizer, where this process is not to run them."""
    encodes: bool = True
    """True if the tokenizer works on texts in this process."""

    async def run(self, size: int, tenant: str, work: Callable[..., T], *args: Any) -> T:
        """`work(*args, model)` for a tenant, which may render and tokenise inputs of `size` bytes together.

        It is done in this process where the files allow it; else by the model's own process, when it is the tenant's
        turn. Raises what `work` raises.
        """
        if self.encodes:
            try:
                return await off_loop(size, work, *args, self)
            except NeedsProcess as error:
                log.debug("a template needs a process", action="confine", model=self.name, reason=str(error))
        assert self.confined is not None
        return await self.confined.run(tenant, work, *args, self.within())

    async def prepare(self) -> None:
        """Try a tokenizer that has a process of its own; the vocabulary is not used before. Raises ModelFileBreach.
        Takes seconds."""
        if not self.prepared:
            assert self.confined is not None
            await self.confined.run("", self.vocabulary.prepare)

    @property
    def prepared(self) -> bool:
        return self.encodes or self.vocabulary.prepared

    def within(self) -> ServedModel:
        """The model as the work sees it that its own process does."""
        keeps = self.template is None or isinstance(self.template, PlainTemplate)
        return self if keeps else replace(self, template=self.confined)


def serve(
    name: str,
    assets: ModelAssets,
    previous: ServedModel | None,
    images: ImageLoader | None,
    tool_parser: CallFormat | None,
    trusted: Collection[str] = (),
    report: Report | None = None,
) -> ServedModel:
    """The model that `assets` describe. Raises any error of a tokenizer that can't be used; ModelFileRefused for one
    that is not to be used. Where the tokenizer has a process of its own, `prepare` is to be called first.

    `trusted` has the names of models, and the SHA-256 of templates, whose templates are rendered without bounds.
    `report` is called when a file of the model broke its bounds.

    Parts made of the `previous` one are kept where they differ in numbers of an epoch alone: a recovery may find other
    memory for KV tokens, and a large tokenizer takes a second to make, in which no other Python thread runs.
    """
    made_of = _digest(assets)
    if previous is not None and previous.made_of == made_of:
        return replace(previous, assets=_without_tokenizer(assets))
    judgement = judge(assets.tokenizer_json)
    if judgement.decoding:
        raise ModelFileRefused(name, "tokenizer", judgement.decoding)
    encodes = not judgement.encoding
    files = Files(assets.chat_template or "", "" if encodes else assets.tokenizer_json)
    confined = ConfinedFiles(name, files, report)
    vocabulary = Vocabulary(assets, None if encodes else confined)
    if (longest := vocabulary.longest_bytes()) > MOST_TOKEN_BYTES:
        raise ModelFileRefused(name, "tokenizer", f"it has a token of {longest} bytes")
    if not encodes:
        log.info("a tokenizer gets a process", action="confine", model=name, reason=judgement.encoding)
    template = _template(name, assets.chat_template, trusted)
    forms = forms_of(assets.chat_template, vocabulary, tool_parser)
    size = text_bytes(assets.context_length, longest)
    gaps = fill_in_middle_of(vocabulary)
    named = letters(vocabulary, assets)
    assets = _without_tokenizer(assets)
    give_back_memory()
    loader = images if assets.images is not None else None
    return ServedModel(name, assets, vocabulary, named, size, forms, gaps, loader, made_of, template, confined, encodes)


def _template(name: str, source: str | None, trusted: Collection[str]) -> Template | None:
    if source is None:
        return None
    digest = hashlib.sha256(source.encode()).hexdigest()
    return PlainTemplate(source) if {name, digest} & {*trusted, *SHIPPED} else MeteredTemplate(source)


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
