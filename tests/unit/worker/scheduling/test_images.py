"""Prefixes with images need equal images."""

from __future__ import annotations

import pytest

from control.messages import PromptImage, Sampling
from worker.scheduling.kv_cache import PrefixCache
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Sequence, SequenceState

PAD = 9
PROMPT = [*range(20), *([PAD] * 40), *range(30)]


def sequence(sid: int, digest: str) -> Sequence:
    images = [PromptImage(20, 40, 40, 64, digest)] if digest else []
    one = Sequence(rid="r", choice=0, prompt=list(PROMPT), sampling=Sampling(max_tokens=9), images=images)
    one.sid = sid
    return one


@pytest.mark.parametrize(("first", "second", "shared"), [("ab", "ab", 89), ("ab", "ac", 20), ("ab", "", 20)])
def test_a_beginning_ends_where_images_differ(first: str, second: str, shared: int) -> None:
    """The tokens are the same in each case."""
    cache, donor = PrefixCache(16), sequence(1, first)
    for state in (SequenceState.WAITING, SequenceState.PREFILL, SequenceState.DECODE):
        donor.move(state)
    donor.cached = len(PROMPT)
    cache.follow(donor)
    start = cache.match(sequence(2, second))
    assert (start.donor, start.count) == (1, shared)


def test_an_image_has_no_token_s_place() -> None:
    assert sequence(1, "ab").identity(18, 22) == [18, 19, ~0xAB, ~0xAB]
    assert sequence(1, "").identity(18, 22) == [18, 19, PAD, PAD]


@pytest.mark.parametrize(
    ("budget", "rows"), [(16, [16, 4, 40, 16, 14]), (30, [20, 40, 30]), (64, [64, 26]), (2, [2] * 10 + [40])]
)
def test_no_row_ends_inside_an_image_that_has_to_be_whole(budget: int, rows: list[int]) -> None:
    """It ends before the image, or above the budget with it."""
    scheduler = Scheduler(kv_tokens=1024, token_budget=budget, max_sequences=4, whole_images=True)
    one = sequence(0, "ab")
    one.sampling = Sampling(max_tokens=9)
    scheduler.add(one)
    found: list[int] = []
    while one.state is not SequenceState.DECODE:
        plan = scheduler.schedule()
        [row] = plan.change.rows
        found.append(len(row.tokens))
        scheduler.update(plan, {one.sid: 1} if row.sample else {})
    assert found[: len(rows)] == rows and sum(found) == len(PROMPT)
