"""Fetches of images begin in a bounded order: bounds for hosts and tenants, and the order of those that wait."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from api.images.fetching import FetchPlaces


class Bench:
    """Fetches that hold their places until they are told to end."""

    def __init__(self, places: FetchPlaces) -> None:
        self.places = places
        self.running: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def add(self, *fetches: str) -> None:
        """Each is TENANT HOST NUMBER, in words."""
        for name in fetches:
            self.tasks[name] = asyncio.create_task(self._fetch(name))
        await self.settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _fetch(self, name: str) -> None:
        tenant, host, _ = name.split()
        end = self._ends[name] = asyncio.Event()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.places.place(tenant, host))
            self.running.append(name)
            stack.callback(self.running.remove, name)
            await end.wait()


async def test_each_host_and_each_tenant_has_a_share() -> None:
    bench = Bench(FetchPlaces(at_once=6, of_host=3, of_tenant=3, of_tenant_at_host=2))
    await bench.add("a x 1", "a x 2", "a x 3")
    assert bench.running == ["a x 1", "a x 2"]  # its share at the host
    await bench.add("a y 1", "a y 2")
    assert bench.running[2:] == ["a y 1"]  # its share of all
    await bench.add("b x 1", "b x 2")
    assert bench.running[3:] == ["b x 1"]  # the host's share
    await bench.add("b y 1", "c y 1", "c z 1")
    assert bench.running[4:] == ["b y 1", "c y 1"]  # all
    await bench.end("b y 1")
    assert bench.running[4:] == ["c y 1", "c z 1"]
    await bench.end("a x 1")
    assert bench.running == ["a x 2", "a y 1", "b x 1", "c y 1", "c z 1", "b x 2"]  # b has fewer under way than a


async def test_a_tenant_that_was_served_goes_behind_the_others() -> None:
    bench = Bench(FetchPlaces(at_once=1, of_host=1, of_tenant=1, of_tenant_at_host=1))
    await bench.add("a x 1", "a x 2", "a x 3", "b x 1", "b x 2", "c x 1")
    order = list[str]()
    while bench.running:
        order += bench.running
        await bench.end(bench.running[0])
    assert order == ["a x 1", "a x 2", "b x 1", "c x 1", "a x 3", "b x 2"]


async def test_a_fetch_that_is_given_up_takes_no_place() -> None:
    """Neither while it waits nor in the moment in which it is granted; nothing of it is left."""
    places = FetchPlaces(at_once=1, of_host=1, of_tenant=1, of_tenant_at_host=1)
    bench = Bench(places)
    await bench.add("a x 1", "b x 1", "c x 1", "d x 1")
    bench.tasks["b x 1"].cancel()
    bench._ends["a x 1"].set()  # pyright: ignore[reportPrivateUsage]
    await bench.settle()
    assert bench.running == ["c x 1"]
    bench.tasks["c x 1"].cancel()
    bench.tasks["d x 1"].cancel()
    await bench.settle()
    assert bench.running == []
    assert not any(getattr(places, name) for name in ("_waiting", "_hosts", "_tenants", "_pairs"))
