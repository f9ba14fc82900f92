"""The scheduler driven by random arrivals, cancels and lengths, against ranks that refuse every wrong plan."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.unit.scheduling.fake_ranks import VOCABULARY, Simulation, alone
from worker.scheduling.kv import KVAccount
from worker.scheduling.sequence import Sequence

prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)
arrivals = st.lists(st.tuples(st.integers(0, 8), prompts, st.integers(1, 48)), min_size=1, max_size=12)
farms = st.fixed_dictionaries(
    {
        "kv_tokens": st.integers(64, 160),
        "token_budget": st.integers(1, 20),
        "max_sequences": st.integers(1, 8),
        "block_tokens": st.sampled_from([1, 1, 4]),
    }
)


@given(farm=farms, arrivals=arrivals)
@settings(max_examples=300, deadline=None)
def test_every_sequence_finishes_as_if_alone(farm: dict[str, int], arrivals: list[tuple[int, list[int], int]]) -> None:
    """Whatever is preempted, paused or cut into chunks, each sequence puts out what it would put out alone."""
    simulation = Simulation(**farm)
    for pause, prompt, max_tokens in arrivals:
        for _ in range(pause):
            if simulation.live:
                simulation.step()
        simulation.add(prompt, max_tokens)
    simulation.finish()
    event("preempted" if simulation.preemptions else "undisturbed")
    event("steady" if simulation.steady_steps else "never steady")
    assert len(simulation.ended) == len(arrivals)
    for sequence in simulation.ended:
        assert sequence.output == alone(sequence.prompt, sequence.sampling.max_tokens)


@given(farm=farms, arrivals=arrivals, data=st.data())
@settings(max_examples=200, deadline=None)
def test_cancels_at_any_moment(
    farm: dict[str, int], arrivals: list[tuple[int, list[int], int]], data: st.DataObject
) -> None:
    """A sequence dropped between steps or while a step runs leaves no trace, and the others are not changed."""
    simulation = Simulation(**farm)
    cancelled: list[Sequence] = []
    for pause, prompt, max_tokens in arrivals:
        for _ in range(pause):
            if simulation.live:
                victim = data.draw(st.none() | st.sampled_from(simulation.live))
                meanwhile = data.draw(st.booleans())
                cancelled += [victim] if victim else []
                if victim and not meanwhile:
                    simulation.cancel(victim)
                if simulation.live:
                    simulation.step(victim if meanwhile else None)
        simulation.add(prompt, max_tokens)
    simulation.finish()
    assert len(simulation.ended) + len(cancelled) == len(arrivals)
    for sequence in simulation.ended:
        assert sequence.output == alone(sequence.prompt, sequence.sampling.max_tokens)


@given(farm=farms, arrivals=arrivals, crash_after=st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_adoption_continues_exactly(
    farm: dict[str, int], arrivals: list[tuple[int, list[int], int]], crash_after: int
) -> None:
    """A new epoch that is given prompt and output so far continues each sequence where it was."""
    first, second = Simulation(**farm), Simulation(**farm)
    for _, prompt, max_tokens in arrivals:
        first.add(prompt, max_tokens)
    for _ in range(crash_after):
        if first.live:
            first.step()
    for sequence in first.live:
        second.add(sequence.prompt, sequence.sampling.max_tokens, sequence.output)
    second.finish()
    for sequence in first.ended + second.ended:
        assert sequence.output == alone(sequence.prompt, sequence.sampling.max_tokens)


def test_the_simulation_preempts() -> None:
    """Sequences that outgrow the KV memory together are preempted, and yet finish with the same tokens."""
    simulation = Simulation(kv_tokens=120, token_budget=64, max_sequences=8)
    for first in range(1, 6):
        simulation.add([first, 11, 30], 60)
    simulation.finish()
    assert simulation.preemptions > 0
    for sequence in simulation.ended:
        assert sequence.output == alone(sequence.prompt, 60)


def test_without_the_account_kv_is_overrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with reservations always granted the same load breaks the ranks, so the test above can fail."""
    monkeypatch.setattr(KVAccount, "reserve", lambda self, sid, tokens, *, spare=0: True)
    simulation = Simulation(kv_tokens=120, token_budget=64, max_sequences=8)
    for first in range(1, 6):
        simulation.add([first, 11, 30], 60)
    monkeypatch.setattr(simulation.scheduler, "check_integrity", lambda: None)
    with pytest.raises(AssertionError, match="KV memory is overrun"):
        simulation.finish()
