"""The KV memory that sequences take."""

from __future__ import annotations

import pytest

from control.placement.need import CHUNK_TOKENS, FREED_TOKENS, KVCost

GEMMA = KVCost(window=1024, windowed_bytes=5, bytes=6)
SLIDING = KVCost(window=4096, windowed_bytes=1, bytes=1)
RECURRENT = KVCost(block_tokens=4, state_tokens=10)


def test_a_sequence_takes_a_token_for_each_position_and_less_beyond_its_windows() -> None:
    positions_in_memory = 1024 + 2 * FREED_TOKENS + CHUNK_TOKENS
    assert [GEMMA.rounded(positions) for positions in (0, 1, positions_in_memory)] == [0, 1, positions_in_memory]
    assert GEMMA.rounded(positions_in_memory + 6000) == positions_in_memory + 1000
    assert SLIDING.rounded(100_000) == SLIDING.rounded(10_000) == 4096 + 2 * FREED_TOKENS + CHUNK_TOKENS
    assert [RECURRENT.rounded(positions) for positions in (0, 1, 8)] == [0, 14, 18]


@pytest.mark.parametrize("cost", [GEMMA, SLIDING, RECURRENT, KVCost()])
def test_the_longest_sequence_is_the_longest_that_fits(cost: KVCost) -> None:
    for tokens in (20, 500, 3000, 5000, 20_000):
        longest = cost.longest(tokens, 50_000)
        assert cost.rounded(longest) <= tokens or cost.block_tokens > 1
        assert longest == 50_000 or cost.rounded(longest + cost.block_tokens) > tokens
    assert cost.longest(5, 50_000) in (0, 5)


def test_what_is_freed_lies_behind_every_window() -> None:
    """It grows in steps, and never by what the next token sees."""
    freed = [GEMMA.freed(positions) for positions in range(5000)]
    assert freed == sorted(freed) and len(set(freed)) == 15
    assert all(first <= max(0, positions - 1024) for positions, first in enumerate(freed))
    assert KVCost().freed(5000) == 0


def test_a_copy_has_the_state_and_what_windows_keep() -> None:
    assert RECURRENT.copy_tokens == 10
    assert GEMMA.copy_tokens == (1024 + 2 * FREED_TOKENS) * 5 // 6
    assert KVCost().copy_tokens == 0
