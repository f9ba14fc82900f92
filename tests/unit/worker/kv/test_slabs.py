"""Slabs and their attention equal the textbook formula: over random histories of many sequences."""

from __future__ import annotations

import ctypes
import errno
import mmap
import random
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kv import slabs
from worker.kv.base import CacheLayout, Extent, LayerCache, Variant
from worker.kv.slabs import FIRST_CAPACITY, Pool, SlabStore, mappable_tokens, tokens_that_fit
from worker.kv.torch.slab_attention import PoolTensors, SlabAttention
from worker.native.memory import clear

HEADS, KV_HEADS, DIM = 4, 2, 8


@pytest.fixture
def layout() -> CacheLayout:
    return CacheLayout((LayerCache(KV_HEADS, DIM),) * 2, np.dtype(np.float64), "cpu")


def textbook(query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
    """One token's attention: query (heads, dim), key and value (kv heads, length, dim)."""
    first = 0 if variant.window is None else max(0, key.shape[1] - variant.window)
    key, value = (one[:, first:].repeat_interleave(HEADS // len(one), dim=0) for one in (key, value))
    scores = torch.einsum("hd,hld->hl", query, key) * variant.scaling
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    weights = scores.exp()
    total = weights.sum(-1) + (0 if variant.sinks is None else variant.sinks.exp())
    return torch.einsum("hl,hld->hd", weights, value) / total.unsqueeze(-1)


VARIANTS = {
    "plain": Variant(0.3),
    "window": Variant(0.3, window=5),
    "softcap": Variant(0.3, softcap=0.8),
    "softcap and window": Variant(0.3, window=5, softcap=0.8),
    "sinks": Variant(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)),
    "sinks and window": Variant(0.3, window=3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_slabs_hold_any_history_of_sequences(layout: CacheLayout, name: str, seed: int) -> None:
    """Sequences join, empty or with the beginning of another, grow by one or several tokens, idle, leave and hand over
    their slab; each token attends as the formula says."""
    chance, variant = random.Random(seed), VARIANTS[name]
    torch.manual_seed(seed)
    store = SlabStore(layout, 10_000)
    truth: dict[int, tuple[Tensor, Tensor]] = {}
    for sid in range(24):
        if truth and chance.random() < 0.4:
            gone = chance.choice(sorted(truth))
            store.drop(gone)
            del truth[gone]
        truth[sid] = (torch.zeros(KV_HEADS, 0, DIM, dtype=torch.float64),) * 2
        if len(truth) > 1 and chance.random() < 0.5:
            donor = chance.choice([one for one in truth if one != sid])
            count, take_over = chance.randint(1, truth[donor][0].shape[1]), chance.random() < 0.5
            store.fork(sid, donor, count, take_over=take_over)
            truth[sid] = (truth[donor][0][:, :count], truth[donor][1][:, :count])
            if take_over:
                del truth[donor]
        busy = [one for one in sorted(truth) if one == sid or chance.random() < 0.6]
        chance.shuffle(busy)
        extents = [Extent(one, truth[one][0].shape[1], chance.choice([1, 1, 1, 4, 9])) for one in busy]
        tokens = sum(extent.count for extent in extents)
        query = torch.randn(HEADS, tokens, DIM, dtype=torch.float64)
        key, value = torch.randn(2, KV_HEADS, tokens, DIM, dtype=torch.float64)
        step, start = store.begin(extents), 0
        for layer in (0, 1):
            out = step.attention.attend(layer, query, key + layer, value + layer, variant)
        store.commit(extents)
        for extent in extents:
            stop = start + extent.count
            old_key, old_value = truth[extent.sid]
            whole_key = torch.cat([old_key, key[:, start:stop] + 1], dim=1)
            whole_value = torch.cat([old_value, value[:, start:stop] + 1], dim=1)
            truth[extent.sid] = (whole_key, whole_value)
            for place in range(extent.count):
                seen = extent.offset + place + 1
                expected = textbook(query[:, start + place], whole_key[:, :seen], whole_value[:, :seen], variant)
                torch.testing.assert_close(out[start + place], expected, rtol=1e-9, atol=1e-9)
            start = stop
        assert store.used_tokens == sum(key.shape[1] for key, _ in truth.values())


def test_memory_is_given_back(layout: CacheLayout) -> None:
    """When the last sequence has left, no slab is kept."""
    store = SlabStore(layout, 10_000)
    extents = [Extent(sid, 0, 200 * sid) for sid in range(1, 12)]
    store.begin(extents)
    store.commit(extents)
    assert store.used_tokens == sum(extent.count for extent in extents)
    assert store.reserved_bytes > 0
    for extent in extents:
        store.drop(extent.sid)
    assert (store.used_tokens, store.reserved_bytes) == (0, 0)


def test_a_sequence_grows_in_few_moves(layout: CacheLayout) -> None:
    """Token by token to 4,096, a sequence changes its slab only when its length has doubled."""
    store = SlabStore(layout, 10_000)
    capacities = []
    for offset in range(4096):
        extent = Extent(1, offset, 1)
        store.begin([extent])
        store.commit([extent])
        capacities.append(store._slabs[1].pool.capacity)
    assert sorted(set(capacities)) == [FIRST_CAPACITY * 2**power for power in range(5)]


def test_what_lies_behind_a_sequence_is_zero(layout: CacheLayout) -> None:
    """Slabs that moved or were used before hold nothing behind their sequence: padding is read, with weight zero."""
    store, chance = SlabStore(layout, 10_000), random.Random(2)
    for sid in range(60):
        offset = 0
        if sid > 4:
            donor = chance.choice(sorted(store._lengths))
            offset = chance.randint(1, store._lengths[donor])
            store.fork(sid, donor, offset, take_over=chance.random() < 0.5)
            if len(store._lengths) > 5:
                store.drop(chance.choice([one for one in store._lengths if one != sid]))
        extent = Extent(sid, offset, chance.randrange(2, 300))
        step = store.begin([extent])
        noise = torch.randn(KV_HEADS, extent.count, DIM, dtype=torch.float64)
        for layer in (0, 1):
            step.attention.attend(
                layer, torch.randn(HEADS, extent.count, DIM, dtype=torch.float64), noise, noise, Variant(1.0)
            )
        store.commit([extent])
        for one, slab in store._slabs.items():
            length = store.length(one)
            (memory,) = (one[:, :, slab.slot] for one in slab.pool.memories)
            assert memory[:, :, :, :length].any()
            assert not memory[:, :, :, length:].any()
        for pools in store._pools.values():
            for pool in pools:
                assert not pool.memories[0][:, :, pool._free].any()


def test_a_large_pool_gets_a_sibling(layout: CacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where doubling would copy too much another pool is made, as large as those there are; attention does not care."""
    monkeypatch.setattr("worker.kv.slabs.DOUBLED_BYTES", 8 * FIRST_CAPACITY * layout.bytes_per_token)
    store = SlabStore(layout, 10_000)
    key = torch.randn(KV_HEADS, 40, DIM, dtype=torch.float64)
    first, second = ([Extent(sid, offset, 1) for sid in range(40)] for offset in (0, 1))
    store.begin(first).attention.attend(0, torch.randn(HEADS, 40, DIM, dtype=torch.float64), key, key, Variant(0.3))
    store.commit(first)
    assert [pool.slots for pool in store._pools[FIRST_CAPACITY]] == [8, 8, 16, 32]
    query = torch.randn(HEADS, 40, DIM, dtype=torch.float64)
    out = store.begin(second).attention.attend(0, query, 2 * key, key, Variant(0.3))
    for sid in range(40):
        keys, values = (torch.stack([key[:, sid], factor * key[:, sid]], dim=1) for factor in (2, 1))
        torch.testing.assert_close(out[sid], textbook(query[:, sid], keys, values, Variant(0.3)))


def test_a_pool_that_can_not_be_mapped_has_fewer_slots(layout: CacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four slots, two, one; a slab never spans more than the store holds. One that can't be mapped raises."""
    sizes: list[int] = []
    most = 4096 * layout.bytes_per_token

    def limited(count: int, kind: np.dtype[Any], large: bool) -> NDArray[Any]:
        sizes.append(count * kind.itemsize // layout.bytes_per_token)
        if count * kind.itemsize > most:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return np.zeros(count, kind)

    monkeypatch.setattr("worker.kv.slabs.zeros", limited)
    store = SlabStore(layout, 5000)
    store.begin([Extent(1, 0, 3000)])
    assert sizes == [2 * 4096, 4096]
    assert store.reserved_bytes == most
    with pytest.raises(OSError, match="Cannot allocate"):
        store.begin([Extent(2, 0, 4097)])
    assert sizes[2:] == [5120]
    store.begin([Extent(3, 0, 3000)])
    assert store.reserved_bytes == 2 * most


@pytest.mark.parametrize("call_bytes", [0, 2**30])
def test_idle_slots_between_busy_ones(layout: CacheLayout, call_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading idle slots along, or not, changes no result."""
    monkeypatch.setattr("worker.kv.torch.slab_attention.CALL_BYTES", call_bytes)
    store = SlabStore(layout, 10_000)
    first = [Extent(sid, 0, 1) for sid in range(12)]
    key = torch.randn(KV_HEADS, 12, DIM, dtype=torch.float64)
    store.begin(first).attention.attend(0, torch.randn(HEADS, 12, DIM, dtype=torch.float64), key, key, Variant(0.3))
    store.commit(first)
    busy = [11, 2, 3, 7]
    query = torch.randn(HEADS, 4, DIM, dtype=torch.float64)
    attention = SlabAttention(store.begin([Extent(sid, 1, 1) for sid in busy]))
    assert len(attention._decodes) == (1 if call_bytes else 3)
    out = attention.attend(0, query, key[:, :4], key[:, :4], Variant(0.3))
    for row, sid in enumerate(busy):
        whole = torch.stack([key[:, sid], key[:, row]], dim=1)
        torch.testing.assert_close(out[row], textbook(query[:, row], whole, whole, Variant(0.3)))


def test_capacity_counts_all_layers_and_the_growth_of_a_pool(layout: CacheLayout) -> None:
    """A token costs keys and values in all layers, twice for the time of a pool's growth."""
    assert layout.bytes_per_token == 2 * 2 * KV_HEADS * DIM * 8
    assert tokens_that_fit(100 * 2 * layout.bytes_per_token, layout) == 100
    assert tokens_that_fit(-5, layout) == 0


MIXED = CacheLayout(
    (LayerCache(2, 8), LayerCache(1, 16), LayerCache(1, 16, source=1), LayerCache(2, 8, source=0), LayerCache(2, 8)),
    np.dtype(np.float64),
    "cpu",
)
"""Layers of two shapes, two of which attend to the keys and values of earlier ones."""


def test_layers_of_several_shapes_share_keys_and_values() -> None:
    """Each layer attends to its own keys and values, or those of its source, whatever it is given beside; only stored
    ones cost memory. A sequence outgrows its slab, and another begins with its positions."""
    assert MIXED.bytes_per_token == 2 * (2 * 2 * 8 + 16) * 8
    torch.manual_seed(0)
    store, truth = SlabStore(MIXED, 10_000), list[list[Tensor]]()
    extents = [Extent(1, 0, 250), Extent(1, 250, 10), Extent(2, 100, 1)]
    for number, extent in enumerate(extents):
        if number == 2:
            store.fork(2, 1, 100, take_over=False)
            truth = [[one[:, :100] for one in pair] for pair in truth]
        step, found = store.begin([extent]), list[Tensor]()
        queries = [torch.randn(HEADS, extent.count, layer.head_dim, dtype=torch.float64) for layer in MIXED.layers]
        for layer, shape in enumerate(MIXED.layers):
            fresh = [torch.randn(shape.kv_heads, extent.count, shape.head_dim, dtype=torch.float64) for _ in "kv"]
            if shape.source is None:
                old = truth[layer] if number else [one[:, :0] for one in fresh]
                pair = [torch.cat([before, new], 1) for before, new in zip(old, fresh, strict=True)]
                truth[layer : layer + 1] = [pair]
            else:
                truth[layer : layer + 1] = [truth[shape.source]]
            found.append(step.attention.attend(layer, queries[layer], fresh[0], fresh[1], Variant(0.3)))
        store.commit([extent])
        for layer in range(len(MIXED.layers)):
            for place in (0, extent.count - 1):
                key, value = (one[:, : extent.offset + place + 1] for one in truth[layer])
                expected = textbook(queries[layer][:, place], key, value, Variant(0.3))
                torch.testing.assert_close(found[layer][place], expected)


def test_pools_of_several_shapes_hold_no_other_memory() -> None:
    """A pool's bytes are those that the layout promises, and cleared slots are zero in every shape."""
    store = SlabStore(MIXED, 10_000)
    key = torch.ones(2, 3, 8, dtype=torch.float64)
    store.begin([Extent(1, 0, 3)]).attention.attend(
        4, torch.ones(HEADS, 3, 8, dtype=torch.float64), key, key, Variant(1.0)
    )
    store.commit([Extent(1, 0, 3)])
    (pool,) = store._pools[FIRST_CAPACITY]
    assert sum(memory.nbytes for memory in pool.memories) == store.reserved_bytes
    assert PoolTensors(pool).keys[4].abs().sum() == 2 * 3 * 8
    pool.clear(store._slabs[1].slot, 0, 3)
    assert all(not memory.any() for memory in pool.memories)


def test_a_sequence_that_moves_never_exists_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of a sequence are copied layer by layer, and each is given back before the next is copied."""
    layout = CacheLayout((LayerCache(8, 64),) * 16, np.dtype(np.float32), "cpu")
    store, process = SlabStore(layout, 8192), psutil.Process()
    [extent] = extents = [Extent(1, 0, 1024)]
    slab = store.begin(extents).slabs[0]
    for memory in slab.pool.memories:
        memory[:, :, slab.slot] = 1.0
    store.commit(extents)
    resident: list[int] = []

    def watched(array: NDArray[Any]) -> None:
        resident.append(process.memory_info().rss)
        clear(array)

    monkeypatch.setattr("worker.kv.slabs.clear", watched)
    before = process.memory_info().rss
    moved = store.begin([Extent(1, extent.end, 1)]).slabs[0]
    assert moved.pool.capacity == 2048 and len(resident) == 2 * 16
    assert max(resident) - before < 2**23
    assert all(bool((one[:, :, moved.slot, :, :1024] == 1).all()) for one in moved.pool.memories)


def resident_of(pools: list[Any]) -> int:
    """Bytes of the whole pages of pools that are in memory, as the kernel says."""
    libc, total = ctypes.CDLL(None, use_errno=True), 0
    for memory in (memory for pool in pools for memory in pool.memories):
        begin = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = (memory.ctypes.data + memory.nbytes - begin) // mmap.PAGESIZE
        there = (ctypes.c_ubyte * pages)()
        assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * mmap.PAGESIZE), there) == 0
        total += mmap.PAGESIZE * sum(one & 1 for one in there)
    return total


def test_the_memory_of_an_ended_sequence_is_free_for_others() -> None:
    """Also while another keeps their pool: KV memory of several lengths one after the other is never there twice."""
    layout = CacheLayout((LayerCache(2, 64),) * 8, np.dtype(np.float32), "cpu")
    store = SlabStore(layout, 8192)
    for sid in range(32):
        store.begin([Extent(sid, 0, 256)])
        for memory in store._slabs[sid].pool.memories:
            memory[:, :, store._slabs[sid].slot] = 1
    pools = store._pools[256]
    full = resident_of(pools)
    assert full >= 32 * 256 * layout.bytes_per_token * 0.95
    for sid in range(32):
        if sid % 8:
            store.drop(sid)
    assert pools == store._pools[256]
    assert resident_of(pools) <= full / 8 + 2**20


def test_a_pool_that_doubles_never_exists_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = CacheLayout((LayerCache(2, 64),) * 8, np.dtype(np.float32), "cpu")
    pool = Pool(layout, 256, 8)
    for memory in pool.memories:
        memory[:] = 1
    old, process, resident = pool.memories, psutil.Process(), list[int]()
    before = process.memory_info().rss

    def cleared(array: NDArray[Any]) -> None:
        clear(array)
        resident.append(process.memory_info().rss)

    monkeypatch.setattr("worker.kv.slabs.clear", cleared)
    pool.double()
    assert pool.slots == 16 and all((memory[:, :, :8] == 1).all() for memory in pool.memories)
    assert not any(memory.any() for memory in old)
    assert max(resident) - before < sum(memory.nbytes for memory in old) / 2


def test_what_can_be_mapped_is_found_also_where_sequences_are_longer_than_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model whose layers all have windows: halving the longest sequence would never come to an end."""
    layout = CacheLayout((LayerCache(2, 64, window=512),) * 2, np.dtype(np.float32), "cpu")
    monkeypatch.setattr(slabs, "_maps", lambda layout, longest: longest <= 1000)
    assert layout.cost.longest(2000, 100_000) == 100_000
    assert mappable_tokens(layout, 2000, 100_000) == 1000
    assert mappable_tokens(layout, 900, 100_000) == 900


def test_memory_behind_windows_is_given_back() -> None:
    """Of the layers that have some, while the sequence grows and moves to larger slabs; a copy of a beginning has what
    its windows see, from where it was kept."""
    layers = (LayerCache(2, 64, window=512),) * 5 + (LayerCache(2, 64),)
    layout = CacheLayout(layers, np.dtype(np.float32), "cpu")
    store = SlabStore(layout, 16_384)
    each = layout.bytes_per_token // 6
    most = 0
    for begin in range(0, 8192, 512):
        extent = Extent(1, begin, 512)
        [slab] = store.begin([extent]).slabs
        for memory in slab.pool.memories:
            memory[:, :, slab.slot, :, begin : extent.end] = begin + 1
        store.commit([extent])
        if extent.end == 2560:
            store.snapshot(1)
        pools = [pool for siblings in store._pools.values() for pool in siblings]
        most = max(most, resident_of(pools) - extent.end * each)
    assert most <= (512 + 2 * 256 + 512) * 5 * each + 2**20
    assert store.held(1) == layout.cost.rounded(8192) + layout.cost.copy_tokens < 8192 * 0.45
    assert [store.can_fork(1, count) for count in (400, 2560, 7000, 8192)] == [False, True, False, True]
    store.fork(2, 1, 2560, take_over=False)
    windowed, full = store._slabs[2].pool.memories
    expected = np.repeat(np.arange(0, 2560, 512) + 1, 512)
    slot = store._slabs[2].slot
    assert (full[0, 0, slot, 0, :2560, 0] == expected).all()
    assert (windowed[0, 0, slot, 0, 2048:2560, 0] == expected[2048:]).all()
    store.drop(2)
    before = resident_of(pools)
    store.fork(3, 1, 2560, take_over=True)
    assert store.length(1) is None and store.can_fork(3, 2560)
    [slab] = store.begin([Extent(3, 2560, 1)]).slabs
    assert (slab.pool.memories[0][0, 0, slab.slot, 0, 2048:2560, 0] == expected[2048:]).all()
    assert resident_of(pools) <= before + 768 * 5 * each + 2**19
