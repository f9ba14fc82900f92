"""Which KV store a device gets; and how large."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from control.errors import NotMappable
from worker.kv import slabs, stores
from worker.kv.base import CacheLayout, LayerCache
from worker.kv.slabs import SlabStore
from worker.kv.torch import plain_attention
from worker.kv.torch import stores as torch_stores


def layout(dtype: str) -> CacheLayout:
    return CacheLayout((LayerCache(2, 8),) * 2, np.dtype(dtype), "cpu")


def test_a_cpu_keeps_slabs() -> None:
    """As many tokens as were asked for, or what half of the host's memory holds for each of its ranks."""
    store = stores.store_for(layout("float32"), 500, 100, ranks=2)
    assert isinstance(store, SlabStore) and (store.capacity_tokens, store.cost.block_tokens) == (500, 1)
    one, four = (stores.store_for(layout("float32"), None, 100, ranks=ranks) for ranks in (1, 4))
    assert one.capacity_tokens > 3 * four.capacity_tokens > 0


def refuse_mappings(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let the kernel map at most `most` bytes at a time."""

    def limited(count: int, kind: np.dtype[Any], large: bool = True) -> NDArray[Any]:
        if count * kind.itemsize > most:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return np.empty(count, kind)

    monkeypatch.setattr(slabs, "zeros", limited)


def test_what_can_not_be_mapped_is_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest sequence's slab is mapped once; what the operator asked for is refused with the number that works,
    and a default is lowered to it. A context that is shorter than the capacity needs less."""
    each = layout("float32").bytes_per_token
    refuse_mappings(monkeypatch, 5000 * each)
    with pytest.raises(NotMappable, match=r"--kv-tokens 16384: .*Use --kv-tokens 4096 or fewer"):
        stores.store_for(layout("float32"), 16_384, 100_000, ranks=1)
    assert stores.store_for(layout("float32"), 4096, 100_000, ranks=1).capacity_tokens == 4096
    assert stores.store_for(layout("float32"), 5000 // 256 * 256, 100_000, ranks=1).capacity_tokens == 4864
    assert stores.store_for(layout("float32"), 16_384, 4000, ranks=1).capacity_tokens == 16_384
    default = stores.store_for(layout("float32"), None, 100_000, ranks=1)
    assert 2048 < default.capacity_tokens <= 5000
    refuse_mappings(monkeypatch, 10)
    for tokens in (300, None):
        with pytest.raises(NotMappable, match=r"no KV memory can be mapped.*ulimit -v"):
            stores.store_for(layout("float32"), tokens, 100_000, ranks=1)


def test_kv_memory_is_a_quarter_of_what_the_control_group_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared by the ranks of the host."""
    monkeypatch.setattr(stores, "available", lambda: 2**20)
    each = layout("float32").bytes_per_token
    assert stores.store_for(layout("float32"), None, 100_000, ranks=1).capacity_tokens == 2**18 // each
    assert stores.store_for(layout("float32"), None, 100_000, ranks=2).capacity_tokens == 2**17 // each


def test_a_gpu_gives_what_is_free_less_a_workspace() -> None:
    """Nine tenths without the workspace, on a small GPU half."""
    assert torch_stores.gpu_budget(100 * 2**30) == 89 * 2**30
    assert torch_stores.gpu_budget(2**30) == 2**29


def test_numbers_without_kernels_are_attended_by_plain_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float64, and any type where Triton is missing, take the slow way and say so."""
    monkeypatch.setattr(torch_stores.importlib.util, "find_spec", lambda name: object())
    assert torch_stores.attention_for(layout("float64")) is plain_attention.attend
    assert "the kernels have no float64" in capsys.readouterr().out
    monkeypatch.setattr(torch_stores.importlib.util, "find_spec", lambda name: None)
    assert torch_stores.attention_for(layout("float16")) is plain_attention.attend
    assert "Triton is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(("at_most", "tokens"), [(False, 4096), (True, 2048)])
def test_a_share_of_a_gpu_is_no_more_than_what_it_has_free(
    monkeypatch: pytest.MonkeyPatch, at_most: bool, tokens: int
) -> None:
    """What the planner chose is an estimate; what the operator named is reserved."""
    each = layout("float32").bytes_per_token
    monkeypatch.setattr(torch_stores.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch_stores.torch.cuda, "mem_get_info", lambda device: (2 * 2048 * each, 2**40))
    store = torch_stores.paged_store(layout("float32"), 4096, 4096, at_most=at_most)
    assert store.capacity_tokens == tokens
    assert torch_stores.paged_store(layout("float32"), 64, 4096, at_most=at_most).capacity_tokens == 64
