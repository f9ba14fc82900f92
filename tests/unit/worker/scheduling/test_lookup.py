"""Guesses from the context: what is guessed, what it costs, and what becomes of right and wrong ones."""

from __future__ import annotations

import random

import pytest

from control.messages import Sampling
from control.placement.need import KVCost
from worker.scheduling.lookup import FIRST_GUESSES, LONGEST_REST, STEP_ROWS, ContextLookup
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Sequence, StepPlan

END = 99


def sequence(prompt: list[int], max_tokens: int = 60, lookup: int | None = None) -> Sequence:
    sampling = Sampling(max_tokens=max_tokens, stop_ids=[END], lookup=lookup)
    return Sequence(rid=str(prompt[:3]), choice=0, prompt=prompt, sampling=sampling)


def following(context: list[int]) -> int:
    """A text that mostly repeats what it said seven tokens ago."""
    noise = sum(context) * 2654435761 % 2**32
    return noise % 90 if noise % 13 == 0 else context[-7]


def alone(prompt: list[int], tokens: int) -> list[int]:
    context = list(prompt)
    for _ in range(tokens):
        context.append(following(context))
    return context[len(prompt) :]


def verify(plan: StepPlan, subject: Scheduler) -> int:
    """Run a plan on ranks that follow `following`; the most tokens that one sequence got."""
    tokens: dict[int, list[int]] = {}
    for sid in plan.sampled:
        one, guesses = plan.sequences[sid], plan.guesses.get(sid, [])
        context = one.context(0, one.length)
        chosen = [following(context)]
        for guess in guesses:
            if guess != chosen[-1]:
                break
            chosen.append(following([*context, *chosen]))
        tokens[sid] = chosen
    first, right = {sid: got[0] for sid, got in tokens.items()}, {sid: len(got) - 1 for sid, got in tokens.items()}
    subject.update(plan, first, right)
    for sid, got in tokens.items():
        one = plan.sequences[sid]
        one.output.extend(got[1:])
        assert len(one.output) <= one.sampling.max_tokens
        if len(one.output) == one.sampling.max_tokens:
            subject.drop(sid)
    subject.check_integrity()
    return max(map(len, tokens.values()), default=0)


def test_answers_are_those_without_guesses_in_fewer_steps() -> None:
    """Three sequences, one of them without guesses by its own wish, in a small memory with preemptions."""
    draw = random.Random(1)
    prompts = [[draw.randrange(90) for _ in range(length)] for length in (9, 12, 30)]
    steps = {}
    for lookup in (0, 8):
        subject = Scheduler(kv_tokens=160, token_budget=24, max_sequences=4, prefix_tokens=None, lookup=lookup)
        running = [sequence(prompt, lookup=0 if index == 1 else None) for index, prompt in enumerate(prompts)]
        for one in running:
            subject.add(one)
        steps[lookup] = 0
        while subject.has_work:
            plan = subject.schedule()
            assert sum(plan.fed.values()) <= 24
            sampled = [(one.sid, one.guessed) for one in plan.to_sample]
            told = {sid: [(sid, tuple(its[:n])) for n in range(len(its) + 1)] for sid, its in plan.guesses.items()}
            for sid, its in plan.logits_rows.items():
                assert [sampled[index] for index in its] == told.get(sid, [(sid, ())])
            assert sum(map(len, plan.logits_rows.values())) == len(sampled)
            assert not any(running[1].sid == sid for sid in plan.guesses)
            verify(plan, subject)
            steps[lookup] += 1
        assert [one.output for one in running] == [alone(prompt, 60) for prompt in prompts]
    assert steps[8] < steps[0]


def test_guesses_leave_room_for_others() -> None:
    """Many sequences share the rows of a step; one that is at its end feeds no token that nobody wants."""
    subject = Scheduler(kv_tokens=10_000, token_budget=512, max_sequences=40, lookup=8)
    for index in range(6):
        subject.add(sequence([index, 1, 2, 3, 4, 5, 6, 7, 8, 9] * 3, max_tokens=5))
    verify(subject.schedule(), subject)
    plan = subject.schedule()
    assert plan.guesses and sum(plan.fed.values()) <= STEP_ROWS
    assert all(len(guesses) <= 3 for guesses in plan.guesses.values())
    for index in range(20):
        subject.add(sequence([index, 11, 12, 13] * 6))
    verify(plan, subject)
    verify(subject.schedule(), subject)
    assert not subject.schedule().guesses


def test_a_step_with_guesses_is_not_steady() -> None:
    """The ranks are told what to verify, so a command does not go on by itself."""
    subject = Scheduler(kv_tokens=1000, token_budget=64, max_sequences=4, lookup=8)
    subject.add(sequence([1, 2, 3, 4, 5, 6, 7] * 4))
    verify(subject.schedule(), subject)
    assert not subject.steady and subject.schedule().guesses


def test_the_longest_common_past_is_chosen() -> None:
    """Of two places where the last tokens occurred, the one with more before them in common; none without any."""
    lookup = ContextLookup()
    one = sequence([9, 8, 1, 2, 3, 50, 7, 1, 2, 3, 60, 9, 8, 1, 2, 3])
    assert lookup.guesses(one, 8) == [50, 7, 1, 2][:FIRST_GUESSES]
    assert lookup.guesses(one, 8) is lookup.guesses(one, 1), "found once while the context stays"
    assert ContextLookup().guesses(sequence([1, 2, 3, 4, 2, 3]), 8) == []
    assert ContextLookup().guesses(sequence([5, 5]), 8) == []
    assert ContextLookup().guesses(sequence([5] * 9), 8) == [5] * FIRST_GUESSES


def test_guesses_grow_while_right_and_rest_while_wrong() -> None:
    """A text whose repetitions always mislead gets a guess in LONGEST_REST tokens, and a new chance after each."""
    lookup, one = ContextLookup(), sequence([1, 2, 3, 4, 5, 6, 7, 8] * 9, max_tokens=4000)
    lookup.guesses(one, 64)
    lookup.verified(one, 4, 4, 64)
    one.output.append(1)
    assert len(lookup.guesses(one, 64)) == 8
    tried = 0
    for index in range(1000):
        one.output.append(one.context(0, 8)[index % 8])
        if guesses := lookup.guesses(one, 64):
            tried += 1
            lookup.verified(one, len(guesses), 0, 64)
    assert 10 < tried <= 8 + 1000 // LONGEST_REST


@pytest.mark.parametrize(("told", "begun"), [(5, 85), (1, 64)])
def test_what_begins_with_an_answer_of_a_model_with_states(told: int, begun: int) -> None:
    """Four guesses were right. An answer that is told whole can be gone on with; one that ended before them has no
    state at its end, and only the copy that was kept of its prompt."""
    subject = Scheduler(
        kv_tokens=2000, token_budget=512, max_sequences=4, lookup=8, prefix_tokens=8, cost=KVCost(state_tokens=50)
    )
    period = [1, 2, 3, 4, 5, 6, 7, 8]
    first = sequence(period * 10)
    subject.add(first)
    while not first.output:
        plan = subject.schedule()
        subject.update(plan, dict.fromkeys(plan.sampled, 1))
    plan = subject.schedule()
    assert plan.guesses == {first.sid: [2, 3, 4, 5]}
    subject.update(plan, {first.sid: 2}, {first.sid: 4})
    first.output += [3, 4, 5, 6][: told - 1]
    subject.drop(first.sid)
    second = sequence([*first.prompt, *first.output, 9, 9])
    subject.add(second)
    subject.schedule()
    assert second.cached_prompt_tokens == begun
