"""Tenants share one scheduler: who gets a place, who gives one up, and that nobody's tokens change by it."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.unit.worker.scheduling.fake_ranks import Simulation, alone
from tests.unit.worker.scheduling.test_simulation import farms, prompts
from worker.scheduling import admission
from worker.scheduling.admission import PrefillTurns, Shares
from worker.scheduling.sequence import Flow, Sequence, SequenceState

HOG, OTHER, THIRD = Flow("hog"), Flow("other"), Flow("third")
LONG = 10_000


def places(simulation: Simulation, flow: Flow) -> int:
    return sum(one.flow == flow and one.state is not SequenceState.WAITING for one in simulation.live)


def farm(max_sequences: int = 8, kv_tokens: int = 1 << 20, token_budget: int = 64) -> Simulation:
    return Simulation(kv_tokens=kv_tokens, token_budget=token_budget, max_sequences=max_sequences, prefix_tokens=4)


def add(simulation: Simulation, flow: Flow, count: int, prompt: int = 1, max_tokens: int = LONG) -> list[Sequence]:
    names = range(count)
    return [simulation.add([1 + name % 5, *[9] * (prompt - 1)], max_tokens, flow=flow) for name in names]


@pytest.fixture(autouse=True)
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sequence of these tests ends by chance."""
    monkeypatch.setattr("tests.unit.worker.scheduling.fake_ranks.EOS", 251)


def test_a_newcomer_has_its_first_token_in_the_next_step() -> None:
    """All places are a hog's, and twenty times as many of its sequences wait: another one comes and is fed at once."""
    simulation = farm()
    add(simulation, HOG, 160)
    for _ in range(5):
        simulation.step()
    assert places(simulation, HOG) == 8
    (newcomer,) = add(simulation, OTHER, 1)
    simulation.step()
    assert len(newcomer.output) == 1 and places(simulation, HOG) == 7


def test_without_victims_the_newcomer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where nobody gives way, the newcomer has nothing as long as the hog goes on."""
    monkeypatch.setattr(Shares, "victim", lambda *_: None)
    simulation = farm()
    add(simulation, HOG, 160)
    simulation.step()
    (newcomer,) = add(simulation, OTHER, 1)
    for _ in range(50):
        simulation.step()
    assert not newcomer.output


def test_two_tenants_meet_in_the_middle_and_stay_there() -> None:
    """Each gets half of the places, and none changes hands after that."""
    simulation = farm()
    add(simulation, HOG, 20)
    simulation.step()
    add(simulation, OTHER, 20)
    for _ in range(5):
        simulation.step()
    assert (places(simulation, HOG), places(simulation, OTHER)) == (4, 4)
    before = simulation.preemptions
    for _ in range(100):
        simulation.step()
    assert simulation.preemptions == before


def test_places_go_back_to_whoever_is_left() -> None:
    """A tenant alone may use everything, before and after the other one's visit."""
    simulation = farm()
    add(simulation, HOG, 20)
    simulation.step()
    visitors = add(simulation, OTHER, 3)
    for _ in range(5):
        simulation.step()
    assert places(simulation, HOG) == 5
    for visitor in visitors:
        simulation.cancel(visitor)
    simulation.step()
    assert places(simulation, HOG) == 8


@pytest.mark.parametrize(("priority", "expected"), [("high", 13), ("normal", 8), ("low", 3)])
def test_a_class_counts_four_times_the_next(priority: str, expected: int) -> None:
    """Of sixteen places a normal tenant keeps a fifth, half or four fifths, by the class of the other."""
    simulation = farm(max_sequences=16)
    add(simulation, HOG, 40)
    simulation.step()
    newcomer = Flow("other", priority)
    add(simulation, newcomer, 40)
    for _ in range(20):
        simulation.step()
    assert abs(places(simulation, newcomer) - expected) <= 1


def test_what_is_given_up_is_not_computed_again() -> None:
    """A preempted sequence begins with the KV that it left, as long as nobody needed the room."""
    simulation = farm(max_sequences=2)
    add(simulation, HOG, 2, prompt=40)
    for _ in range(3):
        simulation.step()
    (visitor,) = add(simulation, OTHER, 1, max_tokens=2)
    while visitor in simulation.live:
        simulation.step()
    fed = simulation.ranks.shared
    simulation.step()
    assert simulation.preemptions == 1 and simulation.ranks.shared - fed >= 40


def test_memory_is_shared_as_places_are() -> None:
    """A hog whose sequences hold all KV gives up as many as a newcomer's prompt needs, and no more."""
    simulation = farm(max_sequences=64, kv_tokens=400)
    add(simulation, HOG, 12, prompt=30, max_tokens=100)
    while places(simulation, HOG) < 8:
        simulation.step()
    (newcomer,) = add(simulation, OTHER, 1, prompt=60, max_tokens=100)
    simulation.step()
    assert newcomer.output and places(simulation, HOG) >= 3


def test_a_hog_with_one_sequence_gives_way_once_it_has_run_for_a_while() -> None:
    """One context holds nearly all memory: another tenant gets its turn, and the long one goes on after that."""
    simulation = farm(kv_tokens=400)
    (hog,) = add(simulation, HOG, 1, prompt=200, max_tokens=200)
    for _ in range(admission.LAST_STAYS_STEPS + 120 // admission.LAST_STAYS_PART):
        simulation.step()
    (newcomer,) = add(simulation, OTHER, 1, prompt=150, max_tokens=20)
    for _ in range(12):
        simulation.step()
    assert newcomer.output and hog.state is SequenceState.WAITING
    simulation.finish()
    assert hog.output == alone(hog.prompt, 200)


def test_long_prompts_are_fed_by_turns() -> None:
    """A hundred long prompts are being fed: another tenant's short one has its token in the next step."""
    simulation = farm(max_sequences=256)
    add(simulation, HOG, 100, prompt=640)
    for _ in range(15):
        simulation.step()
    (newcomer,) = add(simulation, OTHER, 1, prompt=5)
    simulation.step()
    assert newcomer.output


def test_prefill_turns_are_fair_by_weight() -> None:
    """Of 21 turns the classes get 16, 4 and 1, and a flow that comes late has no claim to what it missed."""
    turns, flows = PrefillTurns(), [Flow("a", "high"), Flow("b", "normal"), Flow("c", "low")]
    counts = dict.fromkeys([*flows, HOG], 0)
    for _ in range(210):
        flow = turns.next(flows)
        counts[flow] += 1
        turns.fed(flow, 100)
    assert [counts[flow] for flow in flows] == pytest.approx([160, 40, 10], abs=3)
    first = [turns.next([HOG, flows[0]]) for _ in range(8) if not turns.fed(turns.next([HOG, flows[0]]), 100)]
    assert first.count(HOG) <= 3


def test_a_flow_below_its_share_is_passed_over_sixteen_times_at_most() -> None:
    """Where the leader has fewer places than the better classes' weights, the low class still gets one."""
    simulation = farm(max_sequences=4)
    add(simulation, Flow("low", "low"), 1)
    for _ in range(admission.PASSED_OVER):
        add(simulation, Flow("high", "high"), 4, max_tokens=3)
    simulation.step()
    waits = [one for one in simulation.live if one.flow.priority == "low"]
    for _ in range(80):
        simulation.step()
    assert waits[0].output


def test_a_claim_is_told_who_may_come_beyond_the_room() -> None:
    """A full leader has places for others as long as one flow is above its share and nobody waits for them."""
    simulation = farm(max_sequences=64)
    add(simulation, HOG, 64)
    for _ in range(5):
        simulation.step()
    assert simulation.scheduler.room()[0] == 0
    assert simulation.scheduler.guests() == (admission.MOST_GUESTS, [HOG])
    add(simulation, OTHER, 40)
    assert simulation.scheduler.guests() == (0, [])
    for _ in range(5):
        simulation.step()
    assert (places(simulation, HOG), places(simulation, OTHER)) == (32, 32)
    count, sated = simulation.scheduler.guests()
    assert count == admission.MOST_GUESTS and set(sated) == {HOG, OTHER}


tenants = st.sampled_from([Flow(name, priority) for name in "abc" for priority in ("high", "normal", "low")])
crowds = st.lists(st.tuples(st.integers(0, 8), prompts, st.integers(1, 40), tenants), min_size=2, max_size=14)


@given(farm=farms, crowd=crowds)
@settings(max_examples=100)
def test_everybody_finishes_with_the_tokens_of_an_undisturbed_run(
    farm: dict[str, int], crowd: list[tuple[int, list[int], int, Flow]]
) -> None:
    """Whatever is preempted, each sequence ends, within bounded steps, with the tokens that it has alone."""
    simulation = Simulation(**farm)
    for pause, prompt, max_tokens, flow in crowd:
        for _ in range(pause):
            if simulation.live:
                simulation.step()
        simulation.add(prompt, max_tokens, flow=flow)
    simulation.finish()
    event("preempted" if simulation.preemptions else "undisturbed")
    assert len(simulation.ended) == len(crowd)
    for sequence in simulation.ended:
        assert sequence.output == alone(sequence.prompt, sequence.sampling.max_tokens)


@given(
    crowd=st.lists(st.tuples(tenants, st.integers(1, 40)), min_size=2, max_size=8),
    max_sequences=st.integers(1, 32),
)
@settings(max_examples=60)
def test_nobody_is_above_its_share_while_another_waits(crowd: list[tuple[Flow, int]], max_sequences: int) -> None:
    """Once a few steps have passed: where a flow waits that is a whole place below its share, nobody with more than one
    place is a whole place above its own."""
    simulation = Simulation(kv_tokens=1 << 20, token_budget=512, max_sequences=max_sequences)
    for flow, count in crowd:
        add(simulation, flow, count)
        for _ in range(2 * len(crowd)):
            simulation.step()
        waiting = {one.flow for one in simulation.live if one.state is SequenceState.WAITING}
        flows = {one.flow for one in simulation.live}
        total = sum(admission.weight(flow) for flow in flows)
        share = {flow: max_sequences * admission.weight(flow) / total for flow in flows}
        starved = [flow for flow in waiting if places(simulation, flow) + 1 <= share[flow]]
        greedy = [flow for flow in flows if places(simulation, flow) > max(1, share[flow] + 1)]
        fresh = [flow for flow in starved if any(not one.preempted for one in simulation.live if one.flow == flow)]
        assert not (fresh and greedy), (fresh, greedy)
        assert sum(places(simulation, flow) for flow in flows) == min(max_sequences, len(simulation.live))
