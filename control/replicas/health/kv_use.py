"""The KV memory that replicas use, as their leaders tell it."""

from __future__ import annotations

from control.placement.give_back import Held, KvUse, Uses, lenders
from control.placement.placement import Needs
from control.redis.clients import SyncRedis
from control.redis.connection import run_every
from control.replicas.health.beats import read_beat


def kv_uses(client: SyncRedis, held: Held, needs: Needs) -> Uses:
    """Of the replicas that may be asked to give KV memory back, as far as they serve. Raises RedisUnavailable."""
    places = list(lenders(held, needs))
    beats = run_every(client, [read_beat(model, replica, 0) for model, replica in places])
    return {
        place: KvUse(used=beat.kv_used, limit=beat.kv_limit)
        for place, beat in zip(places, beats, strict=True)
        if beat is not None and beat.kv_limit > 0
    }
