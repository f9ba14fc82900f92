"""Prefixes that sequences share; and the copies of recurrent states at which they can begin."""

from __future__ import annotations

import pytest

from control.commands import Prefix, StepRow
from control.errors import RequestTooLarge
from control.messages import Sampling
from control.placement.need import KVCost
from tests.unit.worker.scheduling.fake_ranks import Simulation
from worker.scheduling.admission import GROWTH_TOKENS
from worker.scheduling.kv_cache import KVAccount, Snapshots
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Sequence, SequenceState, StepPlan

BLOCK = 4


def sequence(prompt: list[int], max_tokens: int = 20, salt: str = "") -> Sequence:
    return Sequence(rid="r", choice=0, prompt=prompt, sampling=Sampling(max_tokens=max_tokens), salt=salt)


def scheduler(kv_tokens: int = 1000, token_budget: int = 64, max_sequences: int = 4) -> Scheduler:
    return Scheduler(kv_tokens=kv_tokens, token_budget=token_budget, max_sequences=max_sequences, prefix_tokens=BLOCK)


def step(subject: Scheduler) -> StepPlan:
    plan = subject.schedule()
    subject.update(plan, dict.fromkeys(plan.sampled, 1))
    subject.check_integrity()
    return plan


def rows(plan: StepPlan) -> list[int]:
    """The sids of its rows."""
    return [row.sid for row in plan.change.rows]


def kept_tokens(subject: Scheduler) -> int:
    return subject.kv_tokens()[1]


def begin(subject: Scheduler, prompt: list[int], steps: int = 1, salt: str = "") -> Sequence:
    """A sequence that has sampled `steps` tokens, each of them 1."""
    begun = sequence(prompt, salt=salt)
    subject.add(begun)
    for _ in range(steps):
        step(subject)
    return begun


def finish(subject: Scheduler, prompt: list[int], steps: int = 1, salt: str = "") -> Sequence:
    """As `begin`, and then it ends."""
    ended = begin(subject, prompt, steps, salt)
    subject.drop(ended.sid)
    subject.check_integrity()
    return ended


def test_a_second_turn_takes_over_the_first() -> None:
    """A prompt that goes on after an ended answer gets that sequence's own KV and computes only what is new."""
    subject = scheduler()
    first = finish(subject, [5, 6, 7, 8, 9], steps=3)  # KV: the prompt and the first two tokens
    assert kept_tokens(subject) == 7
    second = begin(subject, [*first.prompt, 1, 1, 1, 30, 31], steps=0)
    plan = step(subject)
    assert plan.change.prefixes == [Prefix(second.sid, first.sid, 7)]
    assert (plan.change.left, plan.change.kept) == ([first.sid], [])
    assert plan.change.rows == [StepRow(second.sid, [1, 30, 31], 7, True)]
    assert second.cached_prompt_tokens == 7 and kept_tokens(subject) == 0


def test_a_running_donor_is_copied() -> None:
    """The same system prompt beside a sequence that runs: its beginning is copied, and it goes on."""
    subject = scheduler()
    donor = begin(subject, [5, 6, 7, 8, 9, 10])
    other = begin(subject, [5, 6, 7, 8, 20], steps=0)
    plan = step(subject)
    assert plan.change.prefixes == [Prefix(other.sid, donor.sid, 4)]
    assert plan.continuing == [donor.sid] and plan.change.left == []


def test_a_lower_limit_takes_no_more_of_what_is_kept_than_it_must() -> None:
    """The longest unused goes; the ranks are told with the next step, and know all after it."""
    subject = scheduler(kv_tokens=40)
    old = finish(subject, [*range(50, 60)])
    finish(subject, [*range(70, 80)])
    running = begin(subject, [1, 2])
    assert kept_tokens(subject) == 20 and subject.ranks_know_all
    subject.lower_kv_limit(30)
    assert (subject.kv_limit, kept_tokens(subject)) == (30, 10) and not subject.ranks_know_all
    assert step(subject).change.left == [old.sid] and subject.ranks_know_all
    subject.drop(running.sid)
    subject.lower_kv_limit(10)
    assert (subject.kv_limit, kept_tokens(subject)) == (10, 10)
    with pytest.raises(RequestTooLarge):
        subject.add(sequence([1, 2], max_tokens=10))


def test_a_limit_falls_with_what_runs_and_ends_nothing() -> None:
    """Nor does a sequence give way; one that waits still fits."""
    subject = scheduler(kv_tokens=200, max_sequences=2)
    running = [begin(subject, [9, index], steps=4) for index in range(2)]
    waiting = sequence([5], max_tokens=100)
    subject.add(waiting)
    subject.lower_kv_limit(10)
    assert subject.kv_limit == 100
    subject.drop(waiting.sid)
    subject.lower_kv_limit(10)
    assert subject.kv_limit == subject.kv_tokens()[0] + 2 * GROWTH_TOKENS
    assert [one.state for one in running] == [SequenceState.DECODE] * 2
    subject.drop(running[0].sid)
    subject.lower_kv_limit(30)
    assert subject.kv_limit == 30


def test_an_ended_donor_with_more_to_give_stays() -> None:
    """Where a newcomer shares only the beginning of a conversation, its rest is kept for whoever continues it."""
    subject = scheduler()
    donor = finish(subject, [*range(50, 70)])
    other = begin(subject, [*range(50, 60), 3], steps=0)
    plan = step(subject)
    assert plan.change.prefixes == [Prefix(other.sid, donor.sid, 10)]
    assert (plan.change.left, plan.change.kept) == ([], [donor.sid])
    assert step(subject).change.kept == []  # said once


def test_the_longest_prefix_wins() -> None:
    """Of several donors the one that has most in common is taken, to the token."""
    subject = scheduler()
    finish(subject, [*range(50, 56), 1, 2, 3])
    longer = finish(subject, [*range(50, 61), 1, 2, 3, 4, 5, 6])
    finish(subject, [*range(50, 57), 1, 2, 3])
    other = begin(subject, [*range(50, 61), 9, 9], steps=0)
    assert step(subject).change.prefixes == [Prefix(other.sid, longer.sid, 11)]


def test_one_token_is_always_computed() -> None:
    """The very same prompt again leaves its last token to be fed: it is what is sampled from."""
    subject = scheduler()
    finish(subject, [*range(50, 58)])
    again = begin(subject, [*range(50, 58)], steps=0)
    plan = step(subject)
    assert plan.change.rows == [StepRow(again.sid, [57], 7, True)]


def test_short_prefixes_are_not_worth_it() -> None:
    """Less than a block in common is computed, and a sequence of less than a block is not kept."""
    subject = scheduler()
    finish(subject, [5, 6, 7, 8, 9])
    begin(subject, [5, 6, 7, 30, 31], steps=0)
    assert step(subject).change.prefixes == []
    tokens = kept_tokens(subject)
    finish(subject, [40, 41])
    assert kept_tokens(subject) == tokens


def test_nobody_computes_what_another_is_computing() -> None:
    """A prompt that begins as one in prefill waits for it, instead of computing the same beside it."""
    subject = scheduler(token_budget=10)
    donor, other = sequence([*range(50, 65)]), sequence([*range(50, 64), 3])
    subject.add(donor)
    subject.add(other)
    assert rows(step(subject)) == [donor.sid]
    assert rows(step(subject)) == [donor.sid]
    assert other.state is SequenceState.WAITING
    assert step(subject).change.prefixes == [Prefix(other.sid, donor.sid, 14)]


def test_a_prefill_that_was_cancelled_leaves_nothing() -> None:
    """Only what a sampled token has proved is kept."""
    subject = scheduler(token_budget=10)
    half = sequence([*range(50, 75)])
    subject.add(half)
    step(subject)
    subject.drop(half.sid)
    assert kept_tokens(subject) == 0
    begin(subject, [*range(50, 75)], steps=0)
    plan = step(subject)
    assert (plan.change.left, plan.change.prefixes) == ([half.sid], [])


def test_a_failed_sequence_leaves_nothing() -> None:
    """Nor does what it began with stay: its donor may be what is sick."""
    subject = scheduler()
    donor = finish(subject, [*range(50, 70)])
    failing = begin(subject, [*range(50, 60), 3], steps=0)
    subject.update(subject.schedule(), {})
    assert failing.state is SequenceState.ENDED and kept_tokens(subject) == 0
    other = begin(subject, [*range(50, 60), 3], steps=0)
    plan = subject.schedule()
    assert plan.change.left == [failing.sid, donor.sid] and plan.change.prefixes == [] and plan.sampled == [other.sid]


def test_kept_memory_is_free_memory() -> None:
    """Room for claims counts it, and the one that was used longest ago goes first when somebody needs it."""
    subject = scheduler(kv_tokens=60)
    old = finish(subject, [*range(50, 70)])
    young = finish(subject, [*range(80, 100)])
    assert subject.room() == (4, 60) and kept_tokens(subject) == 40
    begin(subject, [*range(120, 150)], steps=0)
    plan = step(subject)
    assert plan.change.left == [old.sid] and plan.change.kept == [young.sid]
    assert kept_tokens(subject) == 20


def test_a_donor_is_used_last_of_all_memory() -> None:
    """Using a kept prefix renews it; where room is short even so, its own KV is handed over."""
    subject = scheduler(kv_tokens=64)
    donor = finish(subject, [*range(50, 70)])
    other = finish(subject, [*range(80, 100)])
    sid = begin(subject, [*range(50, 60), *range(200, 235)], steps=0).sid
    plan = step(subject)
    assert plan.change.prefixes == [Prefix(sid, donor.sid, 10)] and plan.change.left == [other.sid, donor.sid]


def test_growth_lets_go_before_it_preempts() -> None:
    """A decoding sequence gets its next position from what is kept, and nobody is preempted for it."""
    subject = scheduler(kv_tokens=24)
    kept = finish(subject, [50, 51, 52, 53])
    growing = begin(subject, [80, 81], steps=0)
    plans = [step(subject) for _ in range(20)]
    assert [plan.change.left for plan in plans if plan.change.left] == [[kept.sid]]
    assert growing.state is SequenceState.DECODE


def test_ranks_are_told_before_they_go_on() -> None:
    """No step follows by itself where the ranks must first be told to keep a sequence, or to let one go for room."""
    subject = scheduler(kv_tokens=60)
    growing, ending = begin(subject, [80, 81]), begin(subject, [*range(50, 90)])
    assert subject.steady
    subject.drop(ending.sid)
    assert not subject.steady
    assert step(subject).change.kept == [ending.sid]
    steady = []
    for _ in range(17):
        steady.append(subject.steady)
        plan = step(subject)
    assert steady == [True] * 16 + [False] and plan.change.left == [ending.sid]
    assert growing.state is SequenceState.DECODE


def test_isolation_shares_nothing() -> None:
    """While a crash is looked into a sequence computes all of its own, and leaves nothing."""
    subject = scheduler()
    finish(subject, [*range(50, 70)])
    subject.isolating = True
    finish(subject, [*range(50, 70)])
    assert kept_tokens(subject) == 20  # of the first one
    begin(subject, [*range(50, 70)], steps=0)
    assert step(subject).change.prefixes == []
    subject.isolating = False
    begin(subject, [*range(50, 70)], steps=0)
    assert len(step(subject).change.prefixes) == 1


def test_other_salts_share_nothing() -> None:
    """Requests with different salts never begin with each other's KV; those with the same do."""
    subject = scheduler()
    donor = finish(subject, [*range(50, 70)], salt="a")
    other = begin(subject, [*range(50, 70)], steps=0, salt="b")
    plan = step(subject)
    assert plan.change.prefixes == [] and plan.sampled == [other.sid]
    same = begin(subject, [*range(50, 70)], steps=0, salt="a")
    assert step(subject).change.prefixes == [Prefix(same.sid, donor.sid, 19)]


def test_salts_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all hashes are equal: the index finds candidates of other salts, and none is used."""
    monkeypatch.setattr("worker.scheduling.kv_cache.hash", lambda _: 1, raising=False)
    subject = scheduler()
    finish(subject, [*range(50, 70)], salt="a")
    begin(subject, [*range(50, 70)], steps=0, salt="b")
    assert step(subject).change.prefixes == []
    begin(subject, [*range(50, 70)], steps=0, salt="a")
    assert len(step(subject).change.prefixes) == 1


def test_a_scheduler_without_a_prefix_cache() -> None:
    """With sharing switched off nothing is kept and nothing shared."""
    subject = Scheduler(kv_tokens=100, token_budget=64, max_sequences=4, prefix_tokens=None)
    for _ in range(2):
        subject.add(ended := sequence([*range(100, 180)], max_tokens=4))
        plan = step(subject)
        assert plan.change.prefixes == [] and plan.change.rows[0].offset == 0
        subject.drop(ended.sid)
        assert kept_tokens(subject) == 0


def test_a_hash_alone_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts whose blocks have the same hash by accident share only the tokens that are equal."""
    monkeypatch.setattr("worker.scheduling.kv_cache.hash", lambda _: 1, raising=False)
    subject = scheduler()
    finish(subject, [*range(50, 70)])
    begin(subject, [*range(80, 100)], steps=0)
    assert step(subject).change.prefixes == []


def test_integrity_check_sees_a_lost_prefix() -> None:
    """KV that is kept and that nobody can find any more is reported."""
    subject = scheduler()
    ended = finish(subject, [*range(50, 70)])
    subject._prefixes.forget(ended.sid)
    with pytest.raises(RuntimeError, match="lost its integrity"):
        subject.check_integrity()


def with_prompt_of(prompt: int, cached: int = 0) -> Sequence:
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
    planned = with_prompt_of(prompt, cached)
    Snapshots(KVAccount(10_000, KVCost(1, state)), 64).plan(planned, alike)
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
