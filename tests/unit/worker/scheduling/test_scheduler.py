"""Rules of the scheduler: each by the smallest example."""

from __future__ import annotations

import pytest

from control.commands import StepRow
from control.errors import RequestTooLarge
from control.messages import Sampling
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import MOVES, Sequence, SequenceState, StepPlan


def sequence(prompt_tokens: int, max_tokens: int = 20, output: list[int] | None = None) -> Sequence:
    prompt = list(range(100, 100 + prompt_tokens))
    return Sequence(rid="r", choice=0, prompt=prompt, output=output or [], sampling=Sampling(max_tokens=max_tokens))


def scheduler(kv_tokens: int = 1000, token_budget: int = 8, max_sequences: int = 4) -> Scheduler:
    return Scheduler(kv_tokens=kv_tokens, token_budget=token_budget, max_sequences=max_sequences)


def step(subject: Scheduler) -> StepPlan:
    plan = subject.schedule()
    subject.update(plan, dict.fromkeys(plan.sampled, 1))
    return plan


def rows(plan: StepPlan) -> list[int]:
    """The sids of its rows."""
    return [row.sid for row in plan.change.rows]


def test_prompt_is_fed_in_chunks() -> None:
    """A prompt over the token budget is fed in growing offsets, and only its last chunk is sampled."""
    subject = scheduler()
    sid = subject.add(sequence(18))
    plans = [step(subject) for _ in range(3)]
    assert [[(row.sid, row.offset, row.sample) for row in plan.change.rows] for plan in plans] == [
        [(sid, 0, False)],
        [(sid, 8, False)],
        [(sid, 16, True)],
    ]
    assert [token for plan in plans for token in plan.change.rows[0].tokens] == list(range(100, 118))


def test_decode_rows_come_first() -> None:
    """While a long prompt is fed a decoding sequence gets its token in every step, implicitly."""
    subject = scheduler()
    short = subject.add(sequence(3))
    step(subject)
    long = subject.add(sequence(30))
    plan = step(subject)
    assert plan.continuing == [short] and plan.sampled == [short]
    assert rows(plan) == [long] and plan.prompt_tokens == 7


def test_chunks_are_short_beside_rows_that_decode() -> None:
    """Where somebody decodes, all prompts of a step share what may be fed beside it; alone they have the budget."""
    subject = scheduler(token_budget=64)
    subject.mixed_budget = 5
    short = subject.add(sequence(20))
    assert step(subject).fed == {short: 20}
    first, second = subject.add(sequence(7)), subject.add(sequence(30))
    assert step(subject).fed == {short: 1, first: 5}
    assert step(subject).fed == {short: 1, first: 2, second: 3}
    subject.drop(short)
    subject.drop(first)
    assert step(subject).fed == {second: 27}


def test_sampled_lists_continuing_then_rows() -> None:
    """The engine samples the continuing sequences in ascending sid order, then the rows whose context is complete."""
    subject = scheduler()
    first, second = subject.add(sequence(2)), subject.add(sequence(2))
    step(subject)
    third = subject.add(sequence(2))
    assert step(subject).sampled == [first, second, third]


def test_paused_sequences_take_turns() -> None:
    """With more decoding sequences than budget the oldest runs always, the others by turns."""
    subject = scheduler(token_budget=4)
    sids = [subject.add(sequence(1)) for _ in range(4)]
    step(subject)
    subject.token_budget = 2
    plans = [step(subject) for _ in range(4)]
    assert [plan.sampled for plan in plans] == [[sids[0], sids[turn]] for turn in (1, 2, 3, 1)]
    assert [plan.change.paused for plan in plans] == [
        [sids[other] for other in (1, 2, 3) if other != turn] for turn in (1, 2, 3, 1)
    ]


def test_prefill_waits_for_a_budget_full_of_decode_rows() -> None:
    """A newcomer gets what the decode rows leave of the budget, and nothing of theirs."""
    subject = scheduler(token_budget=2)
    sids = [subject.add(sequence(1)) for _ in range(3)]
    assert rows(step(subject)) == sids[:2]
    assert rows(step(subject)) == []
    subject.drop(sids[0])
    assert rows(step(subject)) == [sids[2]]


def test_resumed_sequence_has_an_explicit_row() -> None:
    """A sequence that sat out a step is fed its last token by a row, at the offset of its KV."""
    subject = scheduler(token_budget=3)
    sids = [subject.add(sequence(1)) for _ in range(3)]
    step(subject)
    subject.token_budget = 2
    paused, resumed = step(subject), step(subject)
    assert paused.change.paused == [sids[2]] and paused.continuing == sids[:2]
    assert resumed.change.paused == [sids[1]] and resumed.continuing == [sids[0]]
    assert resumed.change.rows == [StepRow(sids[2], [1], 1, True)]
    assert resumed.sampled == [sids[0], sids[2]]


def test_preempted_restarts_under_a_new_sid() -> None:
    """The youngest is told to leave, keeps its output, and is fed again from offset 0 under another sid."""
    subject = scheduler(kv_tokens=48, token_budget=40)
    old, young = sequence(10, max_tokens=31), sequence(10, max_tokens=31)
    first, young_sid = subject.add(old), subject.add(young)
    while young.sid == young_sid:
        plan = step(subject)
    assert plan.change.left == [young_sid] and plan.continuing == [first]
    assert young.state is SequenceState.WAITING and young.cached == 0
    produced = list(young.output)
    subject.drop(first)
    plan = step(subject)
    assert plan.change.left == [first]
    assert plan.change.rows == [StepRow(young.sid, young.prompt + produced, 0, True)]


def test_drop_reaches_the_ranks_once() -> None:
    """A dropped sequence is in the next plan's `left` if the ranks know it, and never again."""
    subject = scheduler(max_sequences=1)
    known, unknown = subject.add(sequence(2)), subject.add(sequence(2))
    step(subject)
    for sid in (known, unknown, unknown, 99):
        subject.drop(sid)
    last = subject.add(sequence(2))
    assert step(subject).change.left == [known]
    assert step(subject).change.left == []
    subject.drop(last)
    assert not subject.has_work
    subject.check_integrity()


def test_drop_while_the_step_runs() -> None:
    """A sequence dropped between plan and outcome gets no token, and leaves in the next step."""
    subject = scheduler()
    gone, stays = sequence(2), sequence(2)
    sids = [subject.add(gone), subject.add(stays)]
    plan = subject.schedule()
    subject.drop(sids[0])
    subject.update(plan, dict.fromkeys(sids, 5))
    assert (gone.output, stays.output) == ([], [5])
    plan = step(subject)
    assert plan.change.left == [sids[0]] and plan.continuing == [sids[1]]


def test_sequence_without_a_token_is_dropped() -> None:
    """A row that failed ends its sequence, not the step."""
    subject = scheduler()
    failed, fine = subject.add(sequence(2)), subject.add(sequence(2))
    plan = subject.schedule()
    subject.update(plan, {fine: 5})
    plan = step(subject)
    assert plan.change.left == [failed] and plan.sampled == [fine]


def test_what_can_never_fit_is_refused() -> None:
    """A request whose prompt and max_tokens exceed the KV memory is refused with the numbers and the remedy."""
    subject = scheduler(kv_tokens=30)
    subject.add(sequence(11, max_tokens=20))  # the last token is never fed
    with pytest.raises(RequestTooLarge, match=r"12 tokens.*max_tokens \(20\) need 31 .* has 30.*lower max_tokens"):
        subject.add(sequence(12, max_tokens=20))


def test_waiting_is_first_in_first_out() -> None:
    """A small request does not overtake a large one that waits for memory."""
    subject = scheduler(kv_tokens=64, token_budget=64)
    running = subject.add(sequence(20, max_tokens=10))
    step(subject)
    large = subject.add(sequence(40, max_tokens=10))
    last = sequence(1)
    small = subject.add(last)
    assert step(subject).sampled == [running]
    assert last.state is SequenceState.WAITING
    subject.drop(running)
    assert rows(step(subject)) == [large, small]


def test_room_counts_what_waits() -> None:
    """Room for new claims is what neither running nor waiting sequences need."""
    subject = scheduler(kv_tokens=100, max_sequences=4)
    assert subject.room() == (4, 100)
    subject.add(sequence(30))
    assert subject.room() == (3, 70)
    step(subject)
    assert subject.room() == (3, 54)  # and some to grow for each that runs


def test_plans_do_not_overlap() -> None:
    """A second plan before the first is applied is a fault of the caller, as is an outcome for another plan."""
    subject = scheduler()
    subject.add(sequence(2))
    subject.schedule()
    with pytest.raises(RuntimeError, match="before `update` got"):
        subject.schedule()
    with pytest.raises(RuntimeError, match="not the plan"):
        subject.update(StepPlan(), {})


def test_states_move_only_as_the_table_says() -> None:
    """Every move that is not in the table is refused."""
    for start, allowed in MOVES.items():
        for target in SequenceState:
            subject = sequence(1)
            subject.state = start
            if target in allowed:
                subject.move(target)
                assert subject.state is target
            else:
                with pytest.raises(ValueError, match="can't go"):
                    subject.move(target)


def test_integrity_check_sees_leaked_memory() -> None:
    """KV that nobody runs for is reported."""
    subject = scheduler()
    subject._account.reserve(42, 5)
    with pytest.raises(RuntimeError, match="lost its integrity"):
        subject.check_integrity()
