"""Positions of a prompt are scored once: each that is wanted, through chunks, prefixes, preemption, adoption."""

from __future__ import annotations

from collections import Counter

import pytest

from control.messages import Sampling
from tests.unit.worker.scheduling.fake_ranks import FakeRanks
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Sequence

MAX_TOKENS = 40


def sequence(name: str, length: int, scored: int | None, output: list[int] | None = None) -> Sequence:
    sampling = Sampling(max_tokens=MAX_TOKENS, prompt_logprobs=None if scored is None else 1)
    return Sequence(
        rid=name, choice=0, prompt=list(range(length)), sampling=sampling, scored=scored or 0, output=output or []
    )


def run(sequences: list[Sequence], kv_tokens: int, budget: int) -> tuple[Counter[tuple[str, int]], int]:
    """Run all to their ends: how often each position was scored, and the number of preemptions."""
    scheduler = Scheduler(kv_tokens=kv_tokens, token_budget=budget, max_sequences=8, prefix_tokens=4)
    ranks, seen = FakeRanks(kv_tokens, budget), Counter[tuple[str, int]]()
    for one in sequences:
        scheduler.add(one)
    while scheduler.has_work:
        plan = scheduler.schedule()
        for row in plan.change.rows:
            its, fed = plan.sequences[row.sid], range(row.offset, row.offset + len(row.tokens))
            if row.scored is not None:
                positions = range(*row.scored)
                assert positions and positions[0] in fed and positions[-1] in fed
                seen.update((its.rid, position) for position in positions)
            if its.unscored:
                its.scored = min(len(its.prompt), fed.stop + 1)
        rows = plan.to_sample
        scheduler.update(plan, ranks.step(plan))
        for its in rows:
            if len(its.output) == MAX_TOKENS:
                scheduler.drop(its.sid)
        scheduler.check_integrity()
    return seen, sum(one.sid > len(sequences) for one in sequences)


@pytest.mark.parametrize(("kv_tokens", "budget"), [(1000, 7), (1000, 64), (72, 2), (75, 3)])
def test_each_position_is_scored_once(kv_tokens: int, budget: int) -> None:
    """Beside sequences of the same beginning that are not scored, and through preemptions."""
    sequences = [sequence("plain", 20, None), sequence("a", 30, 0), sequence("b", 22, 0), sequence("short", 1, 0)]
    seen, preemptions = run(sequences, kv_tokens, budget)
    assert seen == Counter([("a", position) for position in range(29)] + [("b", position) for position in range(21)])
    assert (preemptions > 0) == (kv_tokens < 100)
    assert all(len(one.output) == MAX_TOKENS for one in sequences)


def test_an_adopted_one_goes_on() -> None:
    """Positions whose scores were sent need no logits again, and may come from other sequences. After the first token
    of the answer no score is left to send."""
    first = sequence("plain", 30, None)
    seen, _ = run([first, sequence("half", 30, 17), sequence("whole", 30, 30, [3])], 1000, 64)
    assert seen == Counter([("half", position) for position in range(16, 29)])


def test_what_is_wanted_is_not_skipped() -> None:
    """A sequence begins with others' KV only as far as its scores have been told."""
    assert sequence("new", 30, 0).reusable == 0
    assert sequence("half", 30, 17).reusable == 16
    assert sequence("told", 30, 30).reusable == sequence("plain", 30, None).reusable == 29
