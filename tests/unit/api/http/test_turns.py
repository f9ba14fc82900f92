"""Turns of tenants by processor time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

from api.http.turns import Turns


class Resource:
    """Turns on a clock of its own: a turn takes what it costs, and no time besides."""

    def __init__(self, places: int = 1) -> None:
        self.now = 0.0
        self.turns = Turns(places, mean=1.0, clock=lambda: self.now)
        self.served: list[str] = []
        self.spent = Counter[str]()

    async def use(self, tenant: str, seconds: float = 1.0) -> None:
        async with self.turns.turn(tenant):
            self.served.append(tenant)
            await asyncio.sleep(0)
            self.now += seconds
            self.spent[tenant] += seconds


async def test_newcomer_waits_for_the_turn_that_runs_only() -> None:
    """A hundred waiting turns of one tenant do not delay another tenant."""
    resource = Resource()
    crowd = [asyncio.create_task(resource.use("crowd")) for _ in range(100)]
    newcomer = asyncio.create_task(resource.use("newcomer"))
    await asyncio.gather(*crowd, newcomer)
    assert resource.served.index("newcomer") == 1


async def test_time_is_shared_not_turns() -> None:
    """A tenant with turns ten times as long has a tenth of the turns while both wait."""
    resource = Resource()
    dear = [resource.use("dear", 10.0) for _ in range(20)]
    cheap = [resource.use("cheap", 1.0) for _ in range(100)]
    tasks = [asyncio.create_task(one) for one in (*dear, *cheap)]
    while resource.spent["cheap"] < 100:
        await asyncio.sleep(0)
    assert resource.spent["dear"] == pytest.approx(100, abs=20)
    await asyncio.gather(*tasks)


async def test_idle_time_earns_no_credit() -> None:
    """A tenant that comes late has its share from then on, and no more."""
    resource = Resource()
    early = [asyncio.create_task(resource.use("early")) for _ in range(100)]
    while len(resource.served) < 50:
        await asyncio.sleep(0)
    late = [asyncio.create_task(resource.use("late")) for _ in range(50)]
    await asyncio.gather(*early, *late)
    assert 4 <= Counter(resource.served[50:60])["early"] <= 6


async def test_a_tenant_that_was_served_goes_behind_the_others() -> None:
    resource = Resource()
    tasks = [asyncio.create_task(resource.use(name)) for name in ("a", "a", "a", "b", "c")]
    await asyncio.gather(*tasks)
    assert resource.served == ["a", "b", "c", "a", "a"]


async def test_places_run_at_once() -> None:
    turns, running = Turns(2), list[int]()

    async def use() -> None:
        async with turns.turn("a"):
            running.append(turns.running)
            await asyncio.sleep(0)

    await asyncio.gather(*(use() for _ in range(5)))
    assert max(running) == 2
    assert turns.running == turns.waiting == 0


async def test_cancelled_waits_give_their_turn_on() -> None:
    """One cancelled while it waits, and one in the moment in which its turn is granted."""
    resource = Resource()
    async with resource.turns.turn("a"):
        waiting, granted, last = (asyncio.create_task(resource.use(name)) for name in ("b", "c", "d"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
    granted.cancel()
    results = await asyncio.gather(waiting, granted, last, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in results] == [True, True, False]
    assert resource.served == ["d"]
    assert resource.turns.running == 0
    assert not resource.turns._tenants


async def test_an_error_in_a_turn_ends_it() -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="x"):
        async with turns.turn("a"):
            raise ValueError("x")
    async with turns.turn("a"):
        pass


async def test_a_cost_that_was_measured_replaces_the_time() -> None:
    turns = Turns(mean=1.0)
    order: list[str] = []

    async def use(tenant: str, cost: float) -> None:
        turn = await turns.begin(tenant)
        order.append(tenant)
        await asyncio.sleep(0)
        turn.end(cost)

    await asyncio.gather(use("dear", 5.0), use("dear", 5.0), *(use("cheap", 1.0) for _ in range(4)))
    assert order == ["dear", "cheap", "cheap", "cheap", "cheap", "dear"]


async def test_use_without_a_turn_counts() -> None:
    turns = Turns(mean=1.0)
    order: list[str] = []

    async def use(tenant: str) -> None:
        async with turns.turn(tenant):
            order.append(tenant)

    turn = await turns.begin("a")
    tasks = [asyncio.create_task(use(tenant)) for tenant in ("a", "b", "b", "b")]
    await asyncio.sleep(0)
    turn.spend(1.0)
    turn.spend(10.0)
    await asyncio.gather(*tasks)
    assert order == ["b", "b", "b", "a"]
    assert turns.running == 0


async def test_a_turn_that_ended_is_waited_for_again() -> None:
    turns = Turns()
    turn = await turns.begin("a")
    await turn.again()
    assert turns.running == 1
    turn.end(0.1)
    turn.end(0.1)
    assert turns.running == 0
    async with turns.turn("b"):
        again = asyncio.create_task(turn.again())
        await asyncio.sleep(0)
        assert not again.done()
    await again
    assert turn.active
    turn.end(0.1)
    assert turns.running == 0


async def test_a_turn_in_which_nothing_was_done_tells_nothing_of_the_cost() -> None:
    turns = Turns(mean=1.0)
    first = await turns.begin("b")
    skipped = asyncio.create_task(_skip(turns))
    last = asyncio.create_task(turns.begin("a"))
    await asyncio.sleep(0)
    assert turns.work_waiting("a") == pytest.approx(2.0)
    first.end(1.0)
    await skipped
    held = await last
    waiting = asyncio.create_task(_skip(turns))
    await asyncio.sleep(0)
    assert turns.work_waiting("a") == pytest.approx(1.0)
    held.end(1.0)
    await waiting


async def _skip(turns: Turns) -> None:
    (await turns.begin("a")).end(None)


async def test_expected_wait_counts_other_tenants() -> None:
    turns = Turns(mean=2.0)
    async with turns.turn("a"):
        tasks = [asyncio.create_task(_take(turns, name)) for name in ("a", "a", "b")]
        await asyncio.sleep(0)
        assert turns.work_waiting("a") == pytest.approx(4.0)
        assert turns.expected_wait("a") == pytest.approx(6.0)
        assert turns.expected_wait("b") == pytest.approx(4.0)
    await asyncio.gather(*tasks)


async def _take(turns: Turns, tenant: str) -> None:
    async with turns.turn(tenant):
        pass


async def test_tenants_whose_turns_cost_nothing_alternate() -> None:
    """Turns of clients that have left are free: they do not go before another tenant for ever."""
    turns, order = Turns(mean=1.0), list[str]()

    async def skip(tenant: str) -> None:
        turn = await turns.begin(tenant)
        order.append(tenant)
        turn.end(None)

    first = await turns.begin("other")
    tasks = [asyncio.create_task(skip("crowd")) for _ in range(20)]
    await asyncio.sleep(0)
    first.end(None)
    tasks.append(asyncio.create_task(skip("other")))
    await asyncio.gather(*tasks)
    assert order.index("other") < 6


async def test_turns_that_nobody_needs_any_more_are_passed_over_at_once() -> None:
    turns, leaving = Turns(mean=1.0), list[Callable[[], object]]()

    @contextmanager
    def watched(cancel: Callable[[], object]) -> Generator[None]:
        leaving.append(cancel)
        yield

    first = await turns.begin("a")
    waiting = [asyncio.create_task(turns.begin("a", watched)) for _ in range(5)]
    await asyncio.sleep(0)
    last = asyncio.create_task(turns.begin("a"))
    await asyncio.sleep(0)
    for cancel in leaving:
        cancel()
    first.end(1.0)
    (await last).end(1.0)
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in results)
    assert turns.running == turns.waiting == 0
