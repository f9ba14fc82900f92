"""Deaths for lack of memory and times of loads are recorded by host."""

from __future__ import annotations

from control import keys
from control.constants import MEMORY_DEATHS_MS
from control.redis.connection import run_every
from control.replicas.memory_deaths import deaths_of, forget_deaths, forget_load, note_death, note_load, server_ms
from tests.contract.conftest import Farm


def test_deaths_are_told_in_order_and_once(farm: Farm) -> None:
    """Of each host its own; a death that is told twice keeps its first time. They lapse by themselves."""
    before = farm.run(server_ms())
    for pid, model in ((7, "a"), (8, "b"), (7, "a")):
        run_every(farm.client, note_death("h1", pid, model, "r0", 1))
    run_every(farm.client, note_death("h2", 9, "c", "r0", 0))
    deaths = farm.run(deaths_of("h1"))
    assert [(death.pid, death.model, death.rank) for death in deaths] == [(7, "a", 1), (8, "b", 1)]
    assert before <= deaths[0].at_ms <= deaths[1].at_ms <= farm.run(server_ms())
    assert 0 < farm.client.pttl(keys.memory_deaths("h1")) <= MEMORY_DEATHS_MS
    forget_deaths(farm.client, "h1")
    assert farm.run(deaths_of("h1")) == [] and len(farm.run(deaths_of("h2"))) == 1


def test_a_load_keeps_its_time(farm: Farm) -> None:
    """A worker that starts anew with the same revision finds when it first had it; another revision is younger."""
    first = note_load(farm.client, "h1", "a", "r0", 1)
    assert note_load(farm.client, "h1", "a", "r0", 1) == first
    farm.client.hset(keys.host_loads("h1"), "a r0", f"1 {first - 5000}")
    assert note_load(farm.client, "h1", "a", "r0", 1) == first - 5000
    assert note_load(farm.client, "h1", "a", "r0", 2) >= first
    forget_load(farm.client, "h1", "a", "r0")
    assert farm.client.exists(keys.host_loads("h1")) == 0
