"""Random arrivals and cancels break no plan of the scheduler: against ranks that refuse every wrong one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.unit.worker.scheduling.fake_ranks import VOCABULARY, Simulation, alone
from worker.scheduling import kv_cache
from worker.scheduling.kv_cache import KVAccount, PrefixCache
from worker.scheduling.sequence import Sequence


@pytest.fixture(scope="module", autouse=True)
def close_snapshots() -> Iterator[None]:
    """Copies of states are kept at places that the short prompts of these tests have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "CLOSING_TOKENS", 2)
        patch.setattr(kv_cache, "INTERVAL_TOKENS", 6)
        yield


prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)
alike = st.lists(st.integers(0, 1), min_size=1, max_size=24)
arrivals = st.lists(st.tuples(st.integers(0, 8), prompts, st.integers(1, 48)), min_size=1, max_size=12)
farms = st.fixed_dictionaries(
    {
        "kv_tokens": st.integers(64, 160),
        "token_budget": st.integers(1, 20),
        "max_sequences": st.integers(1, 8),
        "block_tokens": st.sampled_from([1, 1, 4]),
        "prefix_tokens": st.sampled_from([None, 1, 2, 5]),
        "state_tokens": st.sampled_from([0, 0, 4]),
        "window": st.sampled_from([0, 0, 2, 7]),
    }
)


@given(farm=farms, arrivals=arrivals)
@settings(max_examples=300)
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
@settings(max_examples=200)
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
@settings(max_examples=100)
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


turns = st.lists(
    st.tuples(st.integers(0, 6), st.none() | st.integers(0, 20), alike, st.integers(1, 30)), min_size=2, max_size=10
)


@given(farm=farms, turns=turns, prefix_tokens=st.sampled_from([1, 2, 5]), data=st.data())
@settings(max_examples=120)
def test_shared_prefixes_change_nothing(
    farm: dict[str, int], turns: list[tuple[int, int | None, list[int], int]], prefix_tokens: int, data: st.DataObject
) -> None:
    """Prompts that begin alike, or as an earlier one and its answer, amid cancels and failures: every token is right,
    and nobody begins with what a failed sequence left."""
    simulation = Simulation(**farm | {"prefix_tokens": prefix_tokens})
    block = farm["block_tokens"]
    longest = (farm["kv_tokens"] - farm["state_tokens"]) // block * block
    begun: list[Sequence] = []
    for pause, earlier, text, max_tokens in turns:
        for _ in range(pause):
            if simulation.live:
                victims = st.none() | st.sampled_from(simulation.live)
                simulation.step(*data.draw(st.tuples(victims, st.none()) | st.tuples(st.none(), victims)))
        before = begun[earlier % len(begun)] if begun and earlier is not None else None
        prompt = (before.prompt + before.output + text if before else text)[:40]
        begun.append(simulation.add(prompt, min(max_tokens, longest - len(prompt))))
    simulation.finish()
    event("shared" if simulation.ranks.shared else "not shared")
    for sequence in begun:
        expected = alone(sequence.prompt, sequence.sampling.max_tokens)
        assert sequence.output == expected[: len(sequence.output)]
        assert sequence not in simulation.ended or sequence.output == expected


@given(farm=farms, turns=turns, prefix_tokens=st.sampled_from([1, 2, 5]), lower_at=st.integers(0, 9))
@settings(max_examples=200)
def test_memory_is_given_back_while_sequences_run(
    farm: dict[str, int], turns: list[tuple[int, int | None, list[int], int]], prefix_tokens: int, lower_at: int
) -> None:
    """A limit that falls in the middle: every token is right, every sequence ends, and the ranks keep to the limit from
    the step on that tells them."""
    low = farm["kv_tokens"]
    simulation = Simulation(**farm | {"prefix_tokens": prefix_tokens, "kv_tokens": 3 * low})
    scheduler, block = simulation.scheduler, farm["block_tokens"]
    limit = low // block * block
    longest = (low - farm["state_tokens"]) // block * block

    def step(lowers: bool) -> None:
        if lowers:
            scheduler.lower_kv_limit(low)
            simulation.ranks.kv_tokens = scheduler.kv_limit
        simulation.step()

    for number, (pause, _, text, max_tokens) in enumerate(turns):
        for _ in range(pause):
            if simulation.live:
                step(number >= lower_at)
        simulation.add(text[:40], min(max_tokens, longest - len(text[:40])))
    while simulation.live:
        step(lowers=True)
    scheduler.lower_kv_limit(low)
    assert scheduler.kv_limit == limit and sum(scheduler.kv_tokens()) <= limit
    event("kept" if scheduler.kv_tokens()[1] else "nothing kept")
    for sequence in simulation.ended:
        assert sequence.output == alone(sequence.prompt, sequence.sampling.max_tokens)
    assert len(simulation.ended) == len(turns)


def test_the_simulation_preempts() -> None:
    """Sequences that outgrow the KV memory together are preempted, and yet finish with the same tokens."""
    simulation = Simulation(kv_tokens=120, token_budget=64, max_sequences=8)
    for first in range(1, 6):
        simulation.add([first, 11, 30], 60)
    simulation.finish()
    assert simulation.preemptions > 0
    for sequence in simulation.ended:
        assert sequence.output == alone(sequence.prompt, 60)


def test_without_proof_a_prefix_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: were a context shared before its KV is there, the ranks would notice."""
    monkeypatch.setattr(PrefixCache, "_certain", lambda self, sequence: sequence.length)
    simulation = Simulation(kv_tokens=120, token_budget=12, max_sequences=8, prefix_tokens=2)
    for _ in range(2):
        simulation.add([1, 2, 3, 4, 5, 6, 8, 9], 4)
    with pytest.raises(AssertionError, match="a prefix that its donor does not have"):
        simulation.finish()


def test_without_the_account_kv_is_overrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with reservations always granted the same load breaks the ranks, so the test above can fail."""
    monkeypatch.setattr(KVAccount, "reserve", lambda self, sid, tokens, *, spare=0: True)
    simulation = Simulation(kv_tokens=120, token_budget=64, max_sequences=8)
    for first in range(1, 6):
        simulation.add([first, 11, 30], 60)
    monkeypatch.setattr(simulation.scheduler, "check_integrity", lambda: None)
    with pytest.raises(AssertionError, match="KV memory is overrun"):
        simulation.finish()
