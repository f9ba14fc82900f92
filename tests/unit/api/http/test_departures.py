"""Tenants whose clients leave at once wait."""

from __future__ import annotations

import asyncio

from api.http.connection import Client
from api.http.middleware import AT_ONCE_S, HESITATION_S, Departures, stays


def departures(ages: list[float | None]) -> Departures:
    """After requests of the tenant `t` whose clients left at these ages; None: they stayed."""
    counts = Departures()
    for age in ages:
        counts.count("t", 1.0 if age is None else age, disconnected=age is not None)
    return counts


def test_a_tenant_whose_clients_stay_does_not_wait() -> None:
    assert departures([None] * 40).hesitation("t") == 0
    assert departures([0.005, None] * 40).hesitation("t") == 0


def test_most_clients_left_at_once() -> None:
    """The wait does not follow the ages that were seen: a client may have waited long before it was accepted."""
    assert departures([0.005] * 40).hesitation("t") == HESITATION_S
    assert departures([0.0001] * 40).hesitation("t") == HESITATION_S
    assert departures([0.08] * 40).hesitation("t") == HESITATION_S
    assert departures([0.005] * 40).hesitation("another") == 0


def test_clients_that_stay_end_the_wait() -> None:
    assert departures([0.005] * 40 + [None] * 20).hesitation("t") == 0


def test_a_client_that_waited_and_left_did_not_leave_at_once() -> None:
    assert departures([2 * AT_ONCE_S] * 40).hesitation("t") == 0


async def test_a_client_that_leaves_ends_its_wait() -> None:
    client = Client()
    waiting = asyncio.ensure_future(stays(client, 60.0))
    await asyncio.sleep(0)
    client.leave()
    assert not await asyncio.wait_for(waiting, 10)


async def test_a_client_that_stays_is_waited_for() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await stays(Client(), 0.01)
    assert loop.time() - began >= 0.009
