"""Samples for the console's plots: what they follow from, who writes them, how many are stored."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from api.background.plot_history import PlotHistory
from control import keys
from control.operations.plots import FARM, KEPT_MS, PlotSample, Point, counts_of, keep, sample
from control.redis.clients import SyncRedis
from control.redis.connection import connect_async, hardened, run_every
from control.replicas.health import Beat
from control.replicas.model_overviews import Overview, ReplicaOverview
from tests.integration.api.conftest import ApiProcess
from tests.servers import Server


def overview(model: str, *beats: Beat, queued: int = 0) -> Overview:
    replicas = [
        ReplicaOverview(f"r{place}", 1, "loaded", "", "alpha", ["cpu"], beat.epoch, beat.seq, [beat])
        for place, beat in enumerate(beats)
    ]
    return Overview(model, "loaded", "", queued, 1, 1, 1, ("1", "1000", "100"), replicas)


def beat(tokens: int, *, epoch: int = 1, firsts: int = 0, first_ms: int = 0, kv: int = 0, running: int = 0) -> Beat:
    return Beat(
        epoch=epoch,
        seq=1,
        oldest_pending_ms=0,
        device="cpu",
        memory_bytes=1,
        phase="ready",
        pid=1,
        host="alpha",
        tokens=tokens,
        first_tokens=firsts,
        first_tokens_ms=first_ms,
        kv_used=kv,
        running=running,
    )


def test_a_sample_is_the_change_of_the_counts() -> None:
    """Of the same epochs; one that began since has no rate, and the farm is the sum of its models."""
    before = counts_of([overview("a", beat(100), beat(50)), overview("b", beat(9, epoch=3))])
    now = [
        overview("a", beat(200, firsts=2, first_ms=300, kv=500, running=2), beat(60, kv=900, running=1), queued=4),
        overview("b", beat(1, epoch=4, kv=100)),
    ]
    found = sample(now, before, 10_000, 20_000).points
    assert found["a"] == Point(rate=11.0, first_ms=150.0, queued=4, running=3, kv=0.9)
    assert found["b"] == Point(rate=None, first_ms=None, queued=0, running=0, kv=0.1)
    assert found[FARM] == Point(rate=11.0, first_ms=150.0, queued=4, running=3, kv=0.9)
    many = [overview(f"m{number}", beat(number)) for number in range(100)]
    points = sample(many, counts_of([overview(f"m{number}", beat(0)) for number in range(100)]), 0, 1_000).points
    assert len(points) == 33 and "m99" in points and "m10" not in points


def test_one_process_writes_each_sample(server: Server, redis_client: SyncRedis) -> None:
    """Of two at one moment one does."""
    redis_client.delete(keys.PLOTS, keys.PLOTS_LOCK)

    class Seen:
        overviews: list[Overview] = [overview("a", beat(1))]

    async def rounds() -> None:
        client = hardened(connect_async(server.url))
        histories = [PlotHistory(client, Seen()) for _ in range(2)]  # type: ignore[arg-type]
        for _ in range(2):
            for history in histories:
                await history._run()
        await client.aclose()

    asyncio.run(rounds())
    assert redis_client.xlen(keys.PLOTS) == 1 and 0 < redis_client.pttl(keys.PLOTS) <= KEPT_MS
    redis_client.delete(keys.PLOTS, keys.PLOTS_LOCK)


def test_samples_of_an_hour_are_read(api: ApiProcess, http: httpx.Client, redis_client: SyncRedis) -> None:
    """Oldest first, no more than an hour of them, for operators."""
    redis_client.delete(keys.PLOTS)
    samples = [PlotSample(at_ms=number * 10_000, points={FARM: Point(rate=1.5)}) for number in range(1, 601)]
    for one in samples:
        run_every(redis_client, keep(one))
    data: list[dict[str, Any]] = http.get("/farm/plots").json()["data"]
    times = [one["at_ms"] for one in data]
    assert times == sorted(times) and len(times) <= 361 and times[-1] >= 6_000_000
    assert data[-1]["points"][FARM] == [1.5, None, 0, 0, None] or times[-1] > 6_000_000
    assert redis_client.xlen(keys.PLOTS) < 600
    redis_client.delete(keys.PLOTS)
