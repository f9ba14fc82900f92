"""No script does more work because more is stored: counted by the server, at two sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from control import requests
from control.connection import connect, connect_blocking, run_steps
from control.keys import HAND_OUT
from control.lease import Lease
from control.messages import LogEntry
from control.requests import Emission
from tests.contract.conftest import MODEL, Farm, token
from tests.servers import NEW, serving

SMALL, LARGE = 70, 700
"""Requests, tenants and log entries; both more than one batch, so that each batch is full."""


@pytest.fixture(scope="module")
def growing() -> Iterator[Farm]:
    with serving(NEW) as server, closing(connect(server.url)) as client, closing(connect_blocking(server.url)) as more:
        yield Farm(client, more, server.url)


def commands(farm: Farm, act: Callable[[], object]) -> int:
    """Commands that the server ran for `act`, those inside scripts included, EVALs by text counted as by digest."""
    farm.client.config_resetstat()
    act()
    stats = farm.client.info("commandstats")
    return sum(
        int(one["calls"]) for name, one in stats.items() if name not in ("cmdstat_config|resetstat", "cmdstat_eval")
    )


def crowd(farm: Farm, size: int) -> Lease:
    """`size` tenants with a request each that waits, as many that a replica runs, and one with a log of that length."""
    farm.client.flushall()
    for index in range(size):
        farm.put(f"run-{index}", tenant=f"t{index}", api="gone")
    lease = farm.lead(weights="w")
    farm.client.pexpire(lease.keys.lock, 600_000)
    farm.claim(lease, requests_=size, tokens=10**9)
    farm.put("long", tenant="long", n=2, api="api1", delivered=[token(seq) for seq in range(1, size + 1)])
    for index in range(size):
        farm.put(f"wait-{index}", tenant=f"t{index}", api="gone", priority="low")
    return lease


def adopts(farm: Farm, lease: Lease) -> object:
    return farm.run(requests.adopt(lease))


def claims(farm: Farm, lease: Lease) -> object:
    return farm.run(requests.claim(lease, 1000, 10**9))


def takes_over(farm: Farm, lease: Lease) -> object:
    other = farm.lead("r1", owner="two", weights="w")
    farm.lose(lease)
    return farm.run(requests.takeover(other, lease.replica))


def cancels(farm: Farm, lease: Lease) -> object:
    return farm.run(requests.cancel(MODEL, "long", "long"))


def follows(farm: Farm, lease: Lease) -> object:
    return farm.run(requests.follow(MODEL, "long", "api2", "long", 0, most=10))


def emits(farm: Farm, lease: Lease) -> object:
    return farm.emit(lease, Emission("run-0", 1, [token(1)]))


def reaps(farm: Farm, lease: Lease) -> object:
    return farm.run(requests.reap(MODEL, ["gone"]))


def enqueues(farm: Farm, lease: Lease) -> object:
    return farm.put("new", tenant="new")


@pytest.mark.parametrize("act", [adopts, claims, takes_over, cancels, follows, emits, reaps, enqueues])
def test_a_call_costs_the_same_however_much_is_stored(growing: Farm, act: Callable[[Farm, Lease], object]) -> None:
    """Ten times the requests, tenants and entries: the same commands, within what one more turn is worth."""
    counted: list[int] = []
    for size in (SMALL, LARGE):
        lease = crowd(growing, size)
        act(growing, lease)  # the script is known, and its answer is of the size that it has
        lease = crowd(growing, size)
        counted.append(commands(growing, lambda lease=lease: act(growing, lease)))
    assert counted[1] <= counted[0] + 8, counted


def test_the_control_sees_a_walk(growing: Farm) -> None:
    """A caller that repeats a batch until all is handed out does ten times the work: the count shows it."""
    counted: list[int] = []
    for size in (SMALL, LARGE):
        lease = crowd(growing, size)
        counted.append(commands(growing, lambda lease=lease: growing.adopt(lease)))
    assert counted[1] > 5 * counted[0]


def test_a_leader_s_death_hands_out_ids_and_no_logs(growing: Farm) -> None:
    """However long the logs: an adoption's answer has the same size, and brings HAND_OUT requests at most."""
    growing.client.flushall()
    for index in range(HAND_OUT + 1):
        growing.put(f"r{index}", delivered=[LogEntry(seq, 0, 7) for seq in range(1, 40)])
    growing.claim(growing.lead())
    growing.client.delete(growing.keys.replica("r0").lock)
    lease = growing.lead(owner="two")
    first = growing.run(requests.adopt(lease))
    assert len(first.requests) == HAND_OUT and first.more
    rest = growing.run(requests.adopt(lease, first.after))
    assert len(rest.requests) == 1 and not rest.more
    assert {one.seq for one in [*first.requests, *rest.requests]} == {39}
    again = growing.run(requests.adopt(lease))
    assert again.requests == first.requests, "a repeat hands out the same"


def test_a_log_of_several_pages_is_repaired_in_each_way(growing: Farm) -> None:
    """Appended to and replaced in bounded calls; the leader that ran it is told that it is taken."""
    growing.client.flushall()
    length = 2 * requests.PAGE_ENTRIES + 7
    given = [LogEntry(seq, 0, seq) for seq in range(1, length + 1)]
    growing.put("a", delivered=given[:3])
    lease = growing.lead()
    growing.claim(lease)
    assert run_steps(growing.client, requests.repair(MODEL, "a", "api1", "t", given)) == "appended"
    assert growing.log("a") == given
    other = [*given[:-1], LogEntry(length, 0, 1)]
    assert run_steps(growing.client, requests.repair(MODEL, "a", "api1", "t", other)) == "replaced"
    assert growing.log("a") == other and growing.field("a", "state") == "queued"
    assert growing.emit(lease, Emission("a", length + 1, [])).taken == ["a"]
    assert not growing.client.keys("*staged*")
