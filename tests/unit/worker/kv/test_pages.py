"""Pages and their attention equal the textbook formula: the books of the store, in plain torch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.worker.kv.test_slabs import DIM, HEADS, KV_HEADS, VARIANTS, textbook
from worker.kv.base import CacheLayout, Extent, LayerCache
from worker.kv.torch import plain_attention
from worker.kv.torch.pages import Blocks, PagedStore, tokens_that_fit

BLOCK = 4


@pytest.fixture
def layout() -> CacheLayout:
    return CacheLayout((LayerCache(KV_HEADS, DIM),) * 2, np.dtype(np.float64), "cpu")


@pytest.fixture
def store(layout: CacheLayout) -> PagedStore:
    """40 blocks of 4 positions that hold NaN before anything is written."""
    store = PagedStore(layout, 163, 100, plain_attention.attend, BLOCK)
    store._memories[0].fill_(float("nan"))
    return store


class History:
    """Random sequences in a store, and all that they ever stored."""

    def __init__(self, store: PagedStore, seed: int) -> None:
        self.store, self.chance = store, random.Random(seed)
        self.truth: dict[int, tuple[Tensor, Tensor]] = {}
        torch.manual_seed(seed)

    def feed(self, extents: list[Extent], name: str) -> None:
        """One step, each of whose tokens must attend as the formula says."""
        tokens = sum(extent.count for extent in extents)
        query = torch.randn(HEADS, tokens, DIM, dtype=torch.float64)
        key, value = torch.randn(2, KV_HEADS, tokens, DIM, dtype=torch.float64)
        step, start, variant = self.store.begin(extents), 0, VARIANTS[name]
        out = [step.attention.attend(layer, query, key + layer, value + layer, variant) for layer in (0, 1)][-1]
        self.store.commit(extents)
        for extent in extents:
            new = slice(start, start + extent.count)
            empty = torch.zeros(KV_HEADS, 0, DIM, dtype=torch.float64)
            old = self.truth.get(extent.sid, (empty, empty))
            keys, values = (torch.cat([one, more[:, new] + 1], 1) for one, more in zip(old, (key, value), strict=True))
            self.truth[extent.sid] = (keys, values)
            for place in range(extent.count):
                seen = extent.offset + place + 1
                expected = textbook(query[:, start + place], keys[:, :seen], values[:, :seen], variant)
                torch.testing.assert_close(out[start + place], expected, rtol=1e-9, atol=1e-9)
            start = new.stop

    def length(self, sid: int) -> int:
        return self.truth[sid][0].shape[1] if sid in self.truth else 0

    def fork(self, sid: int, donor: int, count: int, take_over: bool) -> None:
        self.store.fork(sid, donor, count, take_over=take_over)
        self.truth[sid] = tuple(one[:, :count] for one in self.truth[donor])  # type: ignore[assignment]
        if take_over:
            del self.truth[donor]

    def drop(self, sid: int) -> None:
        self.store.drop(sid)
        del self.truth[sid]


@pytest.mark.parametrize("name", VARIANTS)
def test_pages_hold_any_history_of_sequences(store: PagedStore, name: str) -> None:
    """Sequences join, begin as others did, grow, idle and leave; what was never written, NaN, reaches nobody."""
    history = History(store, seed=len(name))
    chance, truth = history.chance, history.truth
    for sid in range(40):
        while len(truth) > 3:
            history.drop(chance.choice(sorted(truth)))
        donors = [one for one in truth if history.length(one) > 1]
        if donors and chance.random() < 0.5:
            donor = chance.choice(donors)
            history.fork(sid, donor, chance.randrange(1, history.length(donor) + 1), chance.random() < 0.5)
        busy = [one for one in sorted({*truth, sid}) if one == sid or chance.random() < 0.6]
        chance.shuffle(busy)
        history.feed([Extent(one, history.length(one), chance.choice([1, 1, 1, 4, 9])) for one in busy], name)
        assert store.used_tokens == sum(-(-history.length(one) // BLOCK) * BLOCK for one in truth)
        assert BLOCK * (store._blocks.count - store.free_blocks) <= store.used_tokens
        assert all(store.length(one) == history.length(one) for one in truth)
    for sid in list(truth):
        history.drop(sid)
    assert (store.used_tokens, store.free_blocks) == (0, 40)


def test_capacity_is_whole_blocks(layout: CacheLayout, store: PagedStore) -> None:
    """The promised capacity is that of whole blocks; less than a block is refused."""
    assert (store.capacity_tokens, store.block_tokens, store.rounded(5)) == (160, BLOCK, 8)
    assert tokens_that_fit(11 * layout.bytes_per_token, layout, BLOCK) == 8
    assert tokens_that_fit(-5, layout, BLOCK) == 0
    with pytest.raises(ValueError, match="3 tokens of KV memory are less than one block of 4"):
        PagedStore(layout, 3, 100, plain_attention.attend, BLOCK)


def test_the_store_can_be_filled_to_the_last_block(store: PagedStore) -> None:
    """Forty sequences of one position fill forty blocks; one more is refused, and a place that is freed is taken."""
    extents = [Extent(sid, 0, 1) for sid in range(40)]
    store.begin(extents)
    store.commit(extents)
    assert (store.used_tokens, store.free_blocks) == (160, 0)
    with pytest.raises(ValueError, match="1 more blocks are needed, 0 of 40 are free"):
        store.begin([Extent(40, 0, 1)])
    store.drop(7)
    store.begin([Extent(40, 0, 4)])
    assert store.free_blocks == 0


def test_a_step_that_failed_keeps_no_block(store: PagedStore) -> None:
    """The step that follows one that was not committed finds the blocks that were free before that."""
    store.begin([Extent(1, 0, 6)])
    store.commit([Extent(1, 0, 6)])
    store.begin([Extent(1, 6, 30), Extent(2, 0, 50)])
    assert store.free_blocks == 40 - 9 - 13
    store.begin([Extent(3, 0, 1)])
    assert (store.free_blocks, store.length(2), store.length(1)) == (40 - 2 - 1, None, 6)


def test_a_step_that_failed_can_be_run_again(store: PagedStore) -> None:
    """Its second run gets the same blocks."""
    store.begin([Extent(1, 0, 6)])
    held = list(store._blocks.of(1))
    store.begin([Extent(1, 0, 6)])
    assert store._blocks.of(1) == held
    assert store.free_blocks == 38


def test_tables_grow_with_the_sequences(layout: CacheLayout) -> None:
    """More sequences than rows double the tables, and what was in them stays."""
    store = PagedStore(layout, 4000, 100, plain_attention.attend, BLOCK)
    extents = [Extent(sid, 0, 1) for sid in range(600)]
    store.begin(extents)
    blocks = [store.tables[store._rows[sid], 0].item() for sid in range(600)]
    assert store.tables.shape == (1024, 32)
    assert blocks == [store._blocks.of(sid)[0] for sid in range(600)]
    store.clear()
    assert (len(store._free_rows), store.free_blocks) == (600 + 424, 1000)


def test_no_sequence_outgrows_its_table(store: PagedStore) -> None:
    """A sequence longer than the model's context is refused before it takes a block."""
    with pytest.raises(ValueError, match="would have 101 positions, the model has 100"):
        store.begin([Extent(1, 0, 101)])
    assert store.free_blocks == 40


def test_shared_blocks_are_free_when_the_last_holder_leaves() -> None:
    """A block that three hold stays until all of them have let go."""
    blocks = Blocks(4)
    blocks.grow(1, 3)
    blocks.share(1, 2, 2)
    blocks.share(2, 3, 1)
    blocks.shrink(1, 0)
    assert blocks.free == 2
    old, new = blocks.separate(3, 0) or (0, 0)
    assert old != new
    assert blocks.separate(2, 0) is None
    blocks.shrink(2, 0)
    blocks.shrink(3, 0)
    assert blocks.free == 4
