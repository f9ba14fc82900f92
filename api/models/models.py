"""The models that this process can serve: the catalog's assets turned into tokenizers, and each model's state.

A background task looks at the farm once a second, so that a request needs no read of its own; one of all API processes
reads for them all. A small farm is read on the event loop, which costs less than a thread does. A name that is not
known is looked up at once, because it may have been loaded a moment ago.

A tokenizer that encodes in a process of its own is tried there first. No look waits for a trial, and the model takes no
requests until it ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from api.chat.forms import Forms, forms_of
from api.chat.metered import NeedsProcess
from api.chat.template import SHIPPED, MeteredTemplate, PlainTemplate, Template
from api.chat.tokens import Vocabulary
from api.http.bodies import IMAGE_BYTES, LEAST_TEXT_BYTES, text_bytes
from api.http.tasks import PeriodicTask
from api.http.turns import off_loop
from api.images.loading import ImageLoader
from api.models.confined import ConfinedFiles, Report
from api.models.fill_in_middle import FillInMiddle, fill_in_middle_of
from api.models.grammar import grammar_tokens
from api.models.model_process import Files
from api.schemas.ollama import LATEST
from api.schemas.view import CallFormat
from api.settings import ApiSettings
from control.constants import ASSETS_LEFT_MS
from control.engines import adapter_in
from control.errors import ModelFileBreach, ModelFileRefused, ModelNotFound, ModelUnavailable, RedisUnavailable
from control.keys import METERED
from control.messages import ModelAssets
from control.process import give_back_memory
from control.records import catalog
from control.records.api_reports import CALLS, KEPT_S, note_breach
from control.redis.clients import AsyncRedis, SyncRedis
from control.redis.connection import arun_steps, read, run_every, run_steps
from control.replicas import model_overviews
from control.replicas.model_overviews import ASLEEP, AssetsMark
from control.text.tokenizer_check import MOST_TOKEN_BYTES, judge, wrong_id

log = structlog.stdlib.get_logger(__name__)

T = TypeVar("T")

_TAKES_TOOLS = re.compile(r"\b(?:xml_)?tools\b")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as this process serves it: its assets, and what was made of them."""

    name: str
    assets: ModelAssets
    vocabulary: Vocabulary
    grammar_tokens: bytes
    """The part of the vocabulary that a grammar can name."""
    text_bytes: int
    """The size of a body that holds a text of a whole context."""
    forms: Forms
    """The forms of the model's reasoning and calls."""
    gaps: FillInMiddle | None = None
    """The marks by which the model fills a gap in a text; None if it can't."""
    images: ImageLoader | None = None
    """None where it takes text only."""
    made_of: bytes = b""
    """The digest of the assets from which all of this was made."""
    template: Template | None = None
    confined: ConfinedFiles | None = None
    """The process of the template and the tokenizer, where this process is not to run them."""
    encodes: bool = True
    """True if the tokenizer works on texts in this process."""

    @property
    def takes_tools(self) -> bool:
        """True if the chat template has a variable for tools."""
        return self.assets.kind == "generate" and _TAKES_TOOLS.search(self.assets.chat_template or "") is not None

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
    response_template: Any = None,
    trusted: Collection[str] = (),
    report: Report | None = None,
) -> ServedModel:
    """The model that `assets` describe. Raises any error of a tokenizer that can't be used; ModelFileRefused for one
    that is not to be used. Where the tokenizer has a process of its own, `prepare` is to be called first.

    `response_template` is one that is read in place of the model's own.
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
    try:
        vocabulary = Vocabulary(assets, None if encodes else confined)
    except Exception as error:  # the library raises no other type
        if reason := wrong_id(assets.tokenizer_json):
            raise ModelFileRefused(name, "tokenizer", reason) from error
        raise
    if (longest := vocabulary.longest_bytes) > MOST_TOKEN_BYTES:
        raise ModelFileRefused(name, "tokenizer", f"it has a token of {longest} bytes")
    if not encodes:
        log.info("a tokenizer gets a process", action="confine", model=name, reason=judgement.encoding)
    template = _template(name, assets.chat_template, trusted)
    own = assets.tokenizer_config.get("response_template") if response_template is None else response_template
    forms = forms_of(assets.chat_template, vocabulary, tool_parser, own)
    size = text_bytes(assets.context_length, longest)
    gaps = fill_in_middle_of(vocabulary)
    named = grammar_tokens(vocabulary, assets)
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


LARGE = 64
"""Replicas of a farm that is read in a thread: the event loop would do nothing else for a millisecond or more."""


class OverviewReader:
    """Reads the overviews of the models, by name."""

    def __init__(self, client: SyncRedis, async_client: AsyncRedis | None) -> None:
        """Without `async_client` each reading is made in a thread."""
        self._client = client
        self._async_client = async_client
        self._size = LARGE
        """Replicas at the last reading."""

    async def read(self, shared: bool) -> dict[str, model_overviews.Overview]:
        """`shared`: as another process read them within the last second. Raises RedisUnavailable."""
        steps = model_overviews.reading_shared() if shared else model_overviews.reading_overviews()
        if self._async_client is not None and self._size < LARGE:
            overviews = await arun_steps(self._async_client, steps)
        else:
            overviews = await asyncio.to_thread(run_steps, self._client, steps)
        self._size = sum(len(overview.replicas) for overview in overviews)
        return {overview.model: overview for overview in overviews}


LOOK_EVERY_S = 1.0
SHARED_AFTER_S = 2.0
"""After a reading of its own a process takes nothing for so long that another one read, which may be older."""

LOST_S = 10.0
"""A model that Redis has lost is unavailable for so long, not unknown: the agents write its specification again."""

LEFT_S = ASSETS_LEFT_MS / 1000

FILES_WAIT_S = 5.0
FILES_LOOK_S = 0.1
"""Seconds for which a request waits for the tokenizer of a model whose files are being read, and between its looks."""
KEPT_ASLEEP = 4
"""Models that sleep whose tokenizers are kept, those with the latest requests."""

TRIALS_AT_ONCE = 4
"""Each may take a processor and 2 GiB."""
TRIAL_WAIT_S = 1.0
"""Seconds for which a request waits for the trial of its model's tokenizer; most trials end sooner."""

_LOST = "its specification is not in Redis just now; retry shortly"
_ON_TRIAL = "its tokenizer has unusual parts and is being tried; retry shortly"

_WAITING_STATES = ("loading", "loaded", "sleeping", "poisoned", "recovering")
"""States in which requests are taken: during a recovery they wait."""


FarmState = tuple[dict[str, model_overviews.Overview], dict[str, tuple[AssetsMark, ServedModel]], dict[str, float]]
"""The result of a look at the farm: the models, those that can be served, and those that Redis has lost."""


class ModelRegistry:
    """The farm's models, as last seen."""

    def __init__(
        self,
        client: SyncRedis,
        settings: ApiSettings,
        images: ImageLoader | None = None,
        async_client: AsyncRedis | None = None,
    ) -> None:
        """`async_client`: for the looks at a small farm; without it all are made in a thread."""
        self._client = client
        self._images = images
        self._reader = OverviewReader(client, async_client)
        self._tool_parser: CallFormat | None = settings.tool_parser
        self._response_template = _content(settings.response_template, msgspec.json.decode)
        self._chat_template: str | None = _content(settings.chat_template, str)
        self._longest_text = settings.body_limits.text_bytes
        self._aliases, self._any_name = _aliases(settings.served_model_names)
        self._overviews: dict[str, model_overviews.Overview] = {}
        self._served: dict[str, tuple[AssetsMark, ServedModel]] = {}
        self._trusted = settings.trusted_templates
        self._broken: dict[str, tuple[AssetsMark, ModelFileRefused | None]] = {}
        """Assets that could not be used, so that they are not tried, and told, every second; and why, for a client."""
        self._trials: dict[str, tuple[Vocabulary, asyncio.Task[None]]] = {}
        """Models of `_served` whose tokenizers are being tried."""
        self._requested: dict[str, None] = {}
        """The KEPT_ASLEEP models with the latest requests, in their order."""
        self._noted: dict[str, float] = {}
        """Models whose calls are not understood: when that was told, by the monotonic clock."""
        self._trial_places = asyncio.Semaphore(TRIALS_AT_ONCE)
        self._lost: dict[str, float] = {}
        """Models that Redis has lost: when that was seen, by the monotonic clock."""
        self._unloaded: dict[str, tuple[float, ServedModel]] = {}
        """Models that were unloaded: when that was seen, by the monotonic clock, and how they were served."""
        self._reading_unloaded = asyncio.Lock()
        self._look: asyncio.Task[None] | None = None
        self._away: RedisUnavailable | None = None
        """The error of the last look. While the periodic task runs, requests raise it and need not try as well."""
        self._task = PeriodicTask("look", self._keep_looking, LOOK_EVERY_S)
        self.start = self._task.start
        self._read_at = 0.0
        """The monotonic time at which this process read the overviews itself."""
        self.reachable = False
        """True if the farm answered when it was last looked at."""

    async def stop(self) -> None:
        await self._task.stop()
        for name in list(self._trials):
            self._end_trial(name)

    async def resolve(self, name: str | None) -> ServedModel:
        """The model that a request means; no name, or an alias without a model, means the only one (`_only`).

        Raises ModelNotFound, or ModelUnavailable for one that failed, is leaving, or has never been loaded; at once
        RedisUnavailable where the last look met nothing else.
        """
        self._check_away()
        if self._real_name(name) not in self._served or not self.reachable:
            await self.look()
        real = self._real_name(name)
        overview = self._overviews.get(real) if real is not None else None
        if real is None or overview is None:
            if (lost := self._lost_name(name)) is not None:
                raise ModelUnavailable(lost, "loading", _LOST)
            raise ModelNotFound(name or "(none given)", self._fitting(name) or self.names)
        if overview.state not in _WAITING_STATES:
            raise ModelUnavailable(real, overview.state, overview.detail or remedy(overview.state))
        self._note_request(real)
        if overview.state == "sleeping" and real not in self._served:
            await self._wait_for_tokenizer(real)
        await self._wait_for_trial(real)
        served = self._usable(real)
        if served is None:
            if real in self._broken and (refusal := self._broken[real][1]) is not None:
                raise ModelFileRefused(refusal.model, refusal.file, refusal.reason)
            raise ModelUnavailable(real, overview.state, "its tokenizer is not there yet; retry shortly")
        return served

    def _note_request(self, name: str) -> None:
        self._requested.pop(name, None)
        self._requested[name] = None
        if len(self._requested) > KEPT_ASLEEP:
            del self._requested[next(iter(self._requested))]

    async def _wait_for_tokenizer(self, name: str) -> None:
        """Of a model that sleeps: it is made for its first request, once the agent has read the model's files."""
        until = time.monotonic() + FILES_WAIT_S
        while name not in self._served and time.monotonic() < until:
            await self.look()
            overview = self._overviews.get(name)
            if overview is None or name in self._broken:
                return
            if overview.assets is None:
                await asyncio.sleep(FILES_LOOK_S)

    async def _wait_for_trial(self, name: str) -> None:
        """Raises ModelUnavailable where the trial of the model's tokenizer takes longer."""
        if name in self._trials:
            await asyncio.wait([self._trials[name][1]], timeout=TRIAL_WAIT_S)
        if name in self._trials:
            raise ModelUnavailable(name, "loading", _ON_TRIAL)

    def _usable(self, name: str) -> ServedModel | None:
        """The model, unless its tokenizer is being tried, or failed its trial since the last look."""
        model = self._served[name][1] if name in self._served else None
        return model if model is not None and model.prepared else None

    def _check_away(self) -> None:
        if self._away is not None and self._task.started:
            raise self._away

    async def all_served(self) -> list[ServedModel]:
        """Every model whose assets are known, and can be used."""
        if not self.reachable:
            await self.look()
        return [served for name in self._served if (served := self._usable(name)) is not None]

    @property
    def names(self) -> list[str]:
        """Every name that a client may use, aliases included; those of models that serve come first."""
        adapted = (
            f"{name}:{adapter}" for name, (_, served) in self._served.items() for adapter in served.assets.adapters
        )
        usable = {*self._overviews, *adapted, *(alias for alias in self._aliases if self._real_name(alias) is not None)}
        return sorted(usable, key=lambda name: (not self._serves(self._real_name(name)), name))

    @property
    def overviews(self) -> list[model_overviews.Overview]:
        return [self._overviews[name] for name in sorted(self._overviews)]

    @property
    def most_text_bytes(self) -> int:
        """The most that a text route reads of a body: the model is not known before the body."""
        models = [served for _, served in self._served.values()]
        if any(overview.state == "sleeping" and name not in self._served for name, overview in self._overviews.items()):
            return self._longest_text + IMAGE_BYTES
        text = min(max((model.text_bytes for model in models), default=LEAST_TEXT_BYTES), self._longest_text)
        return text + (IMAGE_BYTES if any(model.images is not None for model in models) else 0)

    def load_stage(self, name: str) -> str | None:
        """The stage of a model's load, for its requests; None if it serves, as last seen."""
        overview = self._overviews.get(name)
        if overview is None or overview.state not in ("sleeping", "loading"):
            return None
        if overview.state == "sleeping" and overview.detail != ASLEEP:
            return overview.detail
        done, total = (
            sum(getattr(replica, part) for replica in overview.replicas) for part in ("done_bytes", "total_bytes")
        )
        return f"loading {100 * done // total} %" if total else "loading"

    def overview(self, name: str) -> model_overviews.Overview | None:
        """The state of a model on the farm, as last seen; None for an unknown name."""
        real = self._real_name(name)
        return self._overviews.get(real) if real is not None else None

    def steps(self, name: str) -> int:
        """The progress of the model's ranks, as last seen: it changes with each command and inside a long one."""
        overview = self._overviews.get(name)
        replicas = overview.replicas if overview is not None else []
        beats = [beat for replica in replicas for beat in replica.beats if beat is not None]
        return sum(replica.epoch + replica.seq for replica in replicas) + sum(beat.progress for beat in beats)

    def real_name(self, name: str) -> str:
        """The catalog's name of the model that a client named; the client's name if the farm has no such model."""
        return self._real_name(name) or name

    def assets(self, name: str) -> ModelAssets | None:
        """A model's assets in the catalog; None while it was never loaded."""
        real = self._real_name(name)
        return self._served[real][1].assets if real is not None and real in self._served else None

    async def find(self, name: str) -> ServedModel | None:
        """A model by its own name, whatever its state, or as it was when it was unloaded a short time ago; None where
        it has no assets (any more) that can be used. Raises RedisUnavailable; ModelUnavailable while they are tried."""
        self._check_away()
        if not self.reachable:
            await self.look()
        if name not in self._overviews and name not in self._unloaded:
            async with self._reading_unloaded:
                if (
                    name not in self._unloaded
                    and (model := await asyncio.to_thread(self._read_unloaded, name)) is not None
                ):
                    self._unloaded[name] = time.monotonic(), model
        await self._wait_for_trial(name)
        if (served := self._usable(name)) is not None or name not in self._unloaded:
            return served
        unloaded = self._unloaded[name][1]
        try:
            await unloaded.prepare()
        except ModelFileBreach:
            return None
        return unloaded

    def check_lost(self, name: str) -> None:
        """Raises ModelUnavailable for a model that Redis has lost just now, with its requests."""
        if name in self._lost:
            raise ModelUnavailable(name, "loading", _LOST)

    async def look(self, *, shared: bool = False) -> None:
        """Read the catalog and every model's state now; calls meanwhile share the next answer. Raises RedisUnavailable.

        `shared`: take the answer that another process read within the last second.
        """
        running = self._look
        if running is not None and not running.done():
            await asyncio.shield(running)  # it may have begun before what this look is for was there: look once more
        if self._look is running:
            self._look = asyncio.create_task(self._look_once(shared))
        assert self._look is not None
        await asyncio.shield(self._look)

    async def _look_once(self, shared: bool) -> None:
        try:
            overviews = await self._reader.read(shared)
            self._read_at = self._read_at if shared else time.monotonic()
            whole = overviews.keys() == self._overviews.keys() and not self._new_assets(overviews)
            state = self._farm_state(overviews) if whole else await asyncio.to_thread(self._farm_state, overviews)
        except RedisUnavailable as error:
            self.reachable = False
            self._away = error
            raise
        now = time.monotonic()
        before = self._served
        self._overviews, self._served, self._lost = state
        self.reachable = True
        self._away = None
        self._unloaded |= {name: (now, model) for name, (_, model) in before.items() if name not in self._overviews}
        expired = [name for name, (at, _) in self._unloaded.items() if now - at > LEFT_S or name in self._overviews]
        for name in expired:
            del self._unloaded[name]
        if names := self._unknown_calls():
            await asyncio.to_thread(self._note_unknown_calls, names)
        self._begin_trials()

    def _unknown_calls(self) -> list[str]:
        """Models that take tools and write calls in an unknown form, for a report to operators, which is repeated while
        they are served."""
        late = time.monotonic() - KEPT_S / 2
        return [
            name
            for name, (_, model) in self._served.items()
            if self._noted.get(name, -math.inf) < late and model.forms.calls is None and model.takes_tools
        ]

    def _note_unknown_calls(self, names: list[str]) -> None:
        for name in names:
            self._noted[name] = time.monotonic()
            self._report(name, CALLS, "are not understood")

    def _begin_trials(self) -> None:
        """Of the tokenizers that need one; trials of those that are gone end."""
        for name, (vocabulary, _) in list(self._trials.items()):
            if name not in self._served or self._served[name][1].vocabulary is not vocabulary:
                self._end_trial(name)
        for name, (_, model) in self._served.items():
            if not model.prepared and name not in self._trials:
                self._trials[name] = model.vocabulary, asyncio.create_task(self._try(name, model))

    def _end_trial(self, name: str) -> None:
        self._trials.pop(name)[1].cancel()

    async def _try(self, name: str, model: ServedModel) -> None:
        """Encode with it in its process, within its bounds of time and memory. The next look drops it if that fails."""
        async with self._trial_places:
            try:
                await model.prepare()
            except Exception as error:
                self._break(name, self._served[name][0], error)
        del self._trials[name]

    def _break(self, name: str, mark: AssetsMark, error: Exception) -> None:
        self._broken[name] = mark, _refusal(name, error)
        log.error("a model's tokenizer can't be used", action="bad_assets", model=name, exc_info=error)

    def _still_lost(self, overviews: Mapping[str, model_overviews.Overview]) -> dict[str, float]:
        """The models that are not among these `overviews`, and that no unload has taken: their name is lost as well."""
        now = time.monotonic()
        lost = {name: since for name, since in self._lost.items() if name not in overviews and now - since < LOST_S}
        vanished = [name for name in self._overviews if name not in overviews]
        metered_names = run_every(self._client, [read("SISMEMBER", METERED, name, parse=bool) for name in vanished])
        return lost | {name: now for name, metered in zip(vanished, metered_names, strict=True) if not metered}

    def _lost_name(self, name: str | None) -> str | None:
        """The lost model that a client's name means: no name, and an alias, mean the only one that was lost."""
        if name in self._lost:
            return name
        if name and name not in self._aliases and not self._any_name:
            return None
        alias = self._aliases.get(name) if name else None
        if alias:
            return alias if alias in self._lost else None
        return next(iter(self._lost)) if len(self._lost) == 1 and not self._overviews else None

    def _new_assets(self, overviews: Mapping[str, model_overviews.Overview]) -> bool:
        """True if there are some that this process has not made a tokenizer of."""
        served = {name: mark for name, (mark, _) in self._served.items()}
        return any(
            one.assets not in (None, served.get(name), self._broken_mark(name)) and self._needs_tokenizer(one)
            for name, one in overviews.items()
        )

    def _needs_tokenizer(self, overview: model_overviews.Overview) -> bool:
        """False for a model that sleeps, unless requests came for it lately: there may be many, and each takes
        megabytes."""
        if overview.state != "sleeping" or overview.queued:
            return True
        return overview.model in self._requested

    def _broken_mark(self, name: str) -> AssetsMark | None:
        return self._broken[name][0] if name in self._broken else None

    def _farm_state(self, overviews: dict[str, model_overviews.Overview]) -> FarmState:
        """With new assets and models that have vanished only in a thread: they are read, and tokenizers made."""
        served: dict[str, tuple[AssetsMark, ServedModel]] = {}
        for name, overview in overviews.items():
            previous = self._served.get(name)
            mark = overview.assets
            if mark is None or self._broken_mark(name) == mark or not self._needs_tokenizer(overview):
                continue
            if previous is not None and previous[0] == mark:
                served[name] = previous
            elif (assets := catalog.get_assets(self._client, name)) is not None:
                try:
                    made = None if previous is None else previous[1]
                    served[name] = (mark, self._serve(name, assets, made))
                except Exception as error:
                    # One model's broken tokenizer must not hide the others.
                    self._break(name, mark, error)
        return overviews, served, self._still_lost(overviews)

    def _read_unloaded(self, name: str) -> ServedModel | None:
        assets = catalog.get_assets_left(self._client, name)
        try:
            return None if assets is None else self._serve(name, assets, None)
        except Exception as error:
            log.error("an unloaded model's tokenizer can't be used", action="bad_assets", model=name, exc_info=error)
            return None

    def _serve(self, name: str, assets: ModelAssets, previous: ServedModel | None) -> ServedModel:
        report = partial(self._report, name)
        if self._chat_template is not None:
            assets = msgspec.structs.replace(assets, chat_template=self._chat_template)
        return serve(
            name, assets, previous, self._images, self._tool_parser, self._response_template, self._trusted, report
        )

    def _report(self, name: str, file: str, deed: str) -> None:
        """Tell operators of a file that broke its bounds."""
        with suppress(RedisUnavailable):
            note_breach(self._client, name, file, deed)

    async def _keep_looking(self) -> None:
        await self.look(shared=time.monotonic() - self._read_at > SHARED_AFTER_S)

    def _real_name(self, name: str | None) -> str | None:
        """The catalog's name for a client's, or None; NAME:latest, as Ollama's clients write it, is another word for
        NAME."""
        if name and (base := self._without_adapter(name)):
            return base
        real = self._own_or_alias(name)
        if real is None and name and (short := name.removesuffix(LATEST)):
            real = self._own_or_alias(short)
        if real is None and len(fitting := self._fitting(name)) == 1:
            return fitting[0]
        return real

    def _without_adapter(self, name: str) -> str | None:
        """The model of MODEL:NAME, where NAME is an adapter of it; None for other names."""
        model, _, _ = name.rpartition(":")
        if not model or name in self._overviews or (real := self._real_name(model)) not in self._served:
            return None
        return real if adapter_in(name, self._served[real][1].assets.adapters) else None

    def _fitting(self, name: str | None) -> list[str]:
        """The models that a short name such as `qwen3:0.6b` may mean: those whose names begin with the same words."""
        words = _words(name) if name and ":" in name else []
        return [model for model in self._overviews if words and words == _words(_last_part(model))[: len(words)]]

    def _own_or_alias(self, name: str | None) -> str | None:
        """The catalog's name for a client's, or None. A model's own name precedes an alias, unless only that serves."""
        if not name:  # some clients send "" for none
            return self._only()
        exists = name in self._overviews
        if self._serves(name) or (exists and name not in self._aliases):
            return name
        alias = self._aliases.get(name) or (self._only() if name in self._aliases or self._any_name else None)
        return name if exists and not self._serves(alias) else alias

    def _serves(self, name: str | None) -> bool:
        """True if the model was loaded once and takes requests now, if only to keep them until it has recovered."""
        overview = self._overviews.get(name) if name is not None else None
        if overview is None or overview.state not in _WAITING_STATES:
            return False
        return name in self._served or (overview.state == "sleeping" and overview.assets is not None)

    def _only(self) -> str | None:
        """The only model, where there is one.

        A model that failed, leaves, or has not been loaded yet is no second one beside a model that serves; of those
        that don't serve one that is being loaded goes before the others.
        """
        for counts in (self._serves, self._takes_requests, self._overviews.__contains__):
            candidates = [name for name in self._overviews if counts(name)]
            if candidates:
                return candidates[0] if len(candidates) == 1 else None
        return None

    def _takes_requests(self, name: str) -> bool:
        return self._overviews[name].state in _WAITING_STATES


def _last_part(model: str) -> str:
    """Without the organisation of a repository."""
    return model.rpartition("/")[2]


def _words(name: str) -> list[str]:
    """`Qwen3-0.6B-Q4_K_M` and `qwen3:0.6b-q4_K_M` have the same."""
    return re.findall(r"[a-z0-9.]+", name.lower())


def _content(path: str | None, read: Callable[[str], Any]) -> Any:
    """The content of a file of an option; None without one."""
    return None if path is None else read(Path(path).read_text(encoding="utf-8"))


def _refusal(name: str, error: Exception) -> ModelFileRefused | None:
    """The message to clients about a model whose tokenizer can't be used; None if only the log says it."""
    if isinstance(error, ModelFileBreach):
        return ModelFileRefused(name, error.file, f"it {error.deed}")
    return error if isinstance(error, ModelFileRefused) else None


def _aliases(names: tuple[str, ...]) -> tuple[dict[str, str], bool]:
    """`public=model` and `public` (the only model) as a table, and whether `*` makes every name mean the only one."""
    pairs = [name.partition("=") for name in names if name != "*"]
    return {public: model for public, _, model in pairs}, "*" in names
