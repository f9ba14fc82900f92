"""Samples of the last hour for the console's plots: one of the farm and its busiest models every ten seconds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from control import keys
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run
from control.replicas.model_overviews import Overview

EVERY_MS = 10_000
KEPT_MS = 3_600_000
_MOST = KEPT_MS // EVERY_MS
_MODELS = 32
"""Models of one sample; the busiest ones, so that a sample stays small."""
FARM = ""
"""In place of a model: all of them."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """Tokens a second, milliseconds to the first token, waiting and running requests, and the part of the fullest
    replica's KV memory; None where it is not known."""

    rate: float | None = None
    first_ms: float | None = None
    queued: int = 0
    running: int = 0
    kv: float | None = None


class PlotSample(msgspec.Struct, frozen=True, kw_only=True):
    """The points at one moment, by model and of the whole farm."""

    at_ms: int
    points: dict[str, Point]


class Counts(msgspec.Struct, frozen=True):
    """Counts of one replica's epoch, which only grow."""

    tokens: int
    firsts: int
    first_ms: int


Reading = dict[tuple[str, str, int], Counts]
"""By model, replica and epoch."""


def counts_of(overviews: Sequence[Overview]) -> Reading:
    """The counts of all leaders that beat."""
    return {
        (model.model, replica.replica, beat.epoch): Counts(beat.tokens, beat.first_tokens, beat.first_tokens_ms)
        for model in overviews
        for replica in model.replicas
        if replica.beats and (beat := replica.beats[0]) is not None
    }


def sample(overviews: Sequence[Overview], before: Reading, since_ms: int, at_ms: int) -> PlotSample:
    """The sample at a moment; `before` are the counts at `since_ms`. An epoch that has begun since has no rate yet."""
    now = counts_of(overviews)
    seconds = max(1, at_ms - since_ms) / 1000
    changes = {
        key: Counts(after.tokens - old.tokens, after.firsts - old.firsts, after.first_ms - old.first_ms)
        for key, after in now.items()
        if (old := before.get(key)) is not None and after.tokens >= old.tokens
    }
    points = {model.model: _point(model, changes, seconds) for model in overviews}
    busiest = sorted(points, key=lambda name: (-(points[name].rate or 0), -points[name].running, -points[name].queued))
    kvs = [point.kv for point in points.values() if point.kv is not None]
    whole = Point(
        rate=_rate(list(changes.values()), seconds),
        first_ms=_first(list(changes.values())),
        queued=sum(point.queued for point in points.values()),
        running=sum(point.running for point in points.values()),
        kv=max(kvs, default=None),
    )
    return PlotSample(at_ms=at_ms, points={FARM: whole, **{name: points[name] for name in busiest[:_MODELS]}})


def _point(model: Overview, changes: Reading, seconds: float) -> Point:
    beats = [replica.beats[0] for replica in model.replicas if replica.beats]
    leaders = [beat for beat in beats if beat is not None]
    room = int(model.assets[1] or 0) if model.assets else 0
    own = [counts for (name, _, _), counts in changes.items() if name == model.model]
    return Point(
        rate=_rate(own, seconds),
        first_ms=_first(own),
        queued=model.queued,
        running=sum(beat.running for beat in leaders),
        kv=round(max(beat.kv_used for beat in leaders) / room, 4) if leaders and room else None,
    )


def _rate(changes: Sequence[Counts], seconds: float) -> float | None:
    return round(sum(one.tokens for one in changes) / seconds, 2) if changes else None


def _first(changes: Sequence[Counts]) -> float | None:
    firsts = sum(one.firsts for one in changes)
    return round(sum(one.first_ms for one in changes) / firsts, 1) if firsts else None


def take_turn() -> Call[bool]:
    """True for the process that writes this moment's sample."""
    return read("SET", keys.PLOTS_LOCK, "1", "NX", "PX", EVERY_MS - 1_000, parse=bool)


def keep(one: PlotSample) -> list[Call[str]]:
    """Add a sample; those of more than an hour ago give way."""
    text = msgspec.json.encode(one).decode()
    return [
        read("XADD", keys.PLOTS, "MAXLEN", "~", _MOST, "*", "sample", text, parse=str),
        read("PEXPIRE", keys.PLOTS, KEPT_MS, parse=str),
    ]


def samples(client: SyncRedis) -> list[PlotSample]:
    """Those of the last hour, oldest first. Raises RedisUnavailable."""
    newest_first = run(client, read("XREVRANGE", keys.PLOTS, "+", "-", "COUNT", _MOST, parse=_samples))
    return [one for one in reversed(newest_first) if one.at_ms >= newest_first[0].at_ms - KEPT_MS]


def _samples(reply: list[tuple[str, dict[str, str]]]) -> list[PlotSample]:
    return [msgspec.json.decode(fields["sample"], type=PlotSample) for _, fields in reply]
