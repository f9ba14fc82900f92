"""Copies of recurrent states: at which tokens of a prompt they are kept, and what they give way to."""

from __future__ import annotations

import pytest

from control.messages import Sampling
from tests.unit.worker.scheduling.fake_ranks import Simulation
from worker.scheduling.kv_cache import KVAccount, Snapshots
from worker.scheduling.sequence import Sequence


def sequence(prompt: int, cached: int = 0) -> Sequence:
    return Sequence(rid="r", choice=0, prompt=[1] * prompt, sampling=Sampling(max_tokens=1), cached=cached)


@pytest.mark.parametrize(
    ("prompt", "cached", "alike", "state", "places"),
    [
        (2_000, 0, 0, 100, [1_024, 1_984]),
        (1_990, 0, 640, 100, [640, 1_024, 1_920]),  # before the last 16 tokens, and where a beginning in common ends
        (1_500, 0, 0, 100, [1_472]),  # not close before the last one
        (2_000, 1_984, 1_984, 100, []),
        (7_000, 2_000, 0, 3_000, [3_008, 6_976]),  # a copy takes more memory than 1,024 tokens
        (70, 0, 0, 100, []),
    ],
)
def test_the_places_of_a_prompt(prompt: int, cached: int, alike: int, state: int, places: list[int]) -> None:
    """They are whole blocks behind what is cached: before the end, at intervals, and where others part from it."""
    planned = sequence(prompt, cached)
    Snapshots(KVAccount(10_000, 1, state), 64).plan(planned, alike)
    assert planned.planned_snapshots == places


def test_requests_with_a_beginning_in_common_share_it_from_the_third_on() -> None:
    """The second one shows where they part, and keeps a copy of the state there."""
    simulation = Simulation(kv_tokens=4_000, token_budget=500, max_sequences=4, prefix_tokens=64, state_tokens=50)
    instructions = [3] * 300
    for number, cached in enumerate([0, 0, 256, 256]):
        asked = simulation.add([*instructions, *[10 + number] * 100], 3)
        simulation.finish()
        assert asked.cached_prompt_tokens == cached


def test_copies_give_way_to_running_sequences() -> None:
    """A sequence is neither preempted nor kept waiting for memory that copies hold: these are let go of first."""
    simulation = Simulation(kv_tokens=360, token_budget=400, max_sequences=4, prefix_tokens=64, state_tokens=50)
    simulation.add([3] * 100, 30)
    simulation.step()
    simulation.step()
    assert simulation.scheduler.kv_tokens()[1] == 50 and simulation.ranks.snapshots
    simulation.add([4] * 100, 30)
    simulation.step()
    assert simulation.scheduler.kv_tokens() == (301, 0)
    assert not any(simulation.ranks.snapshots.values()), "the ranks were not told"
    simulation.finish()
    assert simulation.preemptions == 0
