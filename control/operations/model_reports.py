"""Reports about a model: the latest epochs of its replicas with their faults, and the memory that it needs beside what
the farm's hosts have left.
"""

from __future__ import annotations

import msgspec

from control.placement import farm
from control.placement.need import HostFit, RankNeed, fits_on
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


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that each rank of a replica needs with `kv_tokens`: those of the specification, or the fewest with
    which the model is placed. `hosts` says what each has left for all of them, or its accelerators for one. Empty where
    the need is not known yet, or where the farm has no such model."""

    model: str
    kv_tokens: int = 0
    ranks: list[RankNeed] = []
    """On CPUs, or on the devices that the specification names."""
    gpu_ranks: list[RankNeed] = []
    hosts: list[HostFit] = []


def memory_of(client: SyncRedis, model: str) -> ModelMemory:
    """Raises RedisUnavailable."""
    spec = catalog.get_spec(client, model)
    need = run(client, farm.needs()).get(model)
    if spec is None or need is None or need.revision != spec.revision:
        return ModelMemory(model=model)
    tokens = spec.kv_tokens or need.least_tokens
    need = need.with_tokens(tokens)
    hosts = fits_on(need, spec.devices, farm.free_memory(client))
    return ModelMemory(model=model, kv_tokens=tokens, ranks=need.ranks, gpu_ranks=need.gpu_ranks, hosts=hosts)
