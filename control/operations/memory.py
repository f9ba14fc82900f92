"""The memory that a model of the farm needs, beside what its hosts have left."""

from __future__ import annotations

import msgspec

from control.placement import farm
from control.placement.need import HostFit, RankNeed, fits_on
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What each rank of a replica needs with `kv_tokens`: those of the specification, or the fewest with which the
    model is placed. `hosts` says what each has left for all of them, or its accelerators for one. Empty where the need
    is not known yet, or where the farm has no such model."""

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
