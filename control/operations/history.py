"""The latest epochs of a model's replicas, with the times of their stages, and the faults that ended them."""

from __future__ import annotations

import msgspec

from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run, run_every
from control.replicas import health


class EpochEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch that was `formed`, or a `fault` that ended one, with the fields of that event. `at_ms` is when the
    leader took its lock, or when the fault was set."""

    at_ms: int
    replica: str
    epoch: int
    event: str
    gathered_ms: int | None = None
    """From the lock until every rank had answered."""
    joined_ms: int | None = None
    """From there until the rendezvous was over."""
    loaded_ms: int | None = None
    """From there until every rank had its shard."""
    rank: int | None = None
    """The rank that caused or noticed the fault; None where no rank did."""
    kind: str = ""
    message: str = ""


def history(client: SyncRedis, model: str) -> list[EpochEvent]:
    """Newest epoch first, its fault above its formation; up to 64 of each are kept for a replica.

    Raises ModelNotFound, RedisUnavailable.
    """
    catalog.model_names(client, model)
    names = sorted(run(client, catalog.replicas(model)))
    formed = run_every(client, [health.formations(model, name) for name in names])
    faults = run_every(client, [health.faults(model, name) for name in names])
    events = [
        *(_formed(name, one) for name, epochs in zip(names, formed, strict=True) for one in epochs),
        *(_fault(name, one) for name, some in zip(names, faults, strict=True) for one in some),
    ]
    return sorted(events, key=lambda one: (one.epoch, one.event == "fault", one.at_ms), reverse=True)


def _formed(replica: str, one: health.Formation) -> EpochEvent:
    return EpochEvent(
        at_ms=one.led,
        replica=replica,
        epoch=one.epoch,
        event="formed",
        gathered_ms=max(0, one.gathered - one.led),
        joined_ms=max(0, one.joined - one.gathered),
        loaded_ms=max(0, one.loaded - one.joined),
    )


def _fault(replica: str, one: health.Fault) -> EpochEvent:
    rank = one.rank if one.rank >= 0 else None
    return EpochEvent(
        at_ms=one.at_ms,
        replica=replica,
        epoch=one.epoch,
        event="fault",
        rank=rank,
        kind=one.kind,
        message=one.message,
    )
