"""`allowed_token_ids` masks tokens: a mask of its own, or a part of a grammar's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from control.messages import Sampling
from worker.sampling.constraints import Constraints
from worker.scheduling.sequence import Sequence


class Even:
    """A grammar that allows the even tokens."""

    vocab_size = 64
    failure = ""

    class Matcher:
        def unsafe_compute_mask_ptr(self, _: int, __: int) -> None: ...

    matcher = Matcher()

    def finish(self, bits: NDArray[np.uint8]) -> None:
        bits[:] = 0b01010101


def row(*, output: list[int] | None = None, constraint: Any = None, **sampling: Any) -> Sequence:
    sequence = Sequence(sid=1, rid="r", choice=0, prompt=[1], sampling=Sampling(max_tokens=9, **sampling))
    sequence.output = output or []
    sequence.constraint = constraint
    return sequence


def tokens(mask: NDArray[np.uint8]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def test_only_listed_tokens_are_allowed() -> None:
    """Of the rows that list some; the others have no mask."""
    constraints, failed = Constraints().of([row(), row(allowed_token_ids=[3, 8, 40])])
    assert list(constraints.allowed) == [1] and not failed and not constraints.impossible
    assert tokens(constraints.allowed[1]) == [3, 8, 40]


def test_the_end_waits_for_min_tokens() -> None:
    """A row with a mask is not asked for its stop ids elsewhere."""
    fields: dict[str, Any] = {"allowed_token_ids": [3, 8], "stop_ids": [8], "min_tokens": 1}
    early, late = Constraints().of([row(**fields), row(output=[3], **fields)])[0].allowed.values()
    assert tokens(early) == [3] and tokens(late) == [3, 8]


def test_a_grammar_and_a_list_hold_together() -> None:
    """What both allow; ids beyond the grammar's vocabulary are none of them."""
    constraints, _ = Constraints().of([row(constraint=Even(), allowed_token_ids=[3, 8, 12, 640])])
    assert tokens(constraints.allowed[0]) == [8, 12]


def test_a_row_without_a_token_is_impossible() -> None:
    """It must not be sampled, and its neighbours are."""
    fields: dict[str, Any] = {"stop_ids": [8], "min_tokens": 1}
    rows = [row(constraint=Even(), allowed_token_ids=[3]), row(allowed_token_ids=[8], **fields), row()]
    constraints, failed = Constraints().of(rows)
    assert constraints.impossible == {0, 1} and not constraints.allowed and not failed
