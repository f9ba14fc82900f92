"""Paged attention in Triton equals dense attention: over random layouts."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel here")

from worker.kv.base import Extent, Variant
from worker.kv.torch import paged_kernels as paged
from worker.kv.torch import plain_attention
from worker.kv.torch.paged_kernels import decode, keys_at_once, splits_for
from worker.kv.torch.pages import PagedBatch, paged_batch

PAGE, WIDTH = 16, 8

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Scene:
    """Pages with random content, tables that name them in random order, and a batch of new tokens."""

    def __init__(
        self,
        extents: list[Extent],
        device: torch.device,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 32,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        chance, count = random.Random(seed), len(extents) * WIDTH
        tables = torch.tensor(chance.sample(range(count), count), dtype=torch.int32, device=device)
        rows = chance.sample(range(len(extents)), len(extents))
        self.batch = paged_batch(tables.view(len(extents), WIDTH), rows, extents)
        tokens = sum(extent.count for extent in extents)
        # As a projection leaves them: (T, heads, dim) seen as (heads, T, dim).
        self.query, self.key, self.value = (
            torch.randn(tokens, some, dim, device=device).to(dtype).transpose(0, 1)
            for some in (heads, kv_heads, kv_heads)
        )
        shape = (2, count, kv_heads, PAGE, dim)
        self.memory = torch.full(shape, float("nan"), device=device).to(dtype)
        for row, extent in zip(rows, extents, strict=True):
            for place in range(extent.offset):
                block = self.batch.tables[row, place // PAGE]
                self.memory[:, block, :, place % PAGE] = torch.randn(2, kv_heads, dim, device=device).to(dtype)

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        return self.memory[0], self.memory[1]

    def expected(self, variant: Variant) -> Tensor:
        """Dense attention of the same numbers in float64."""
        query, key, value, *memory = (one.double() for one in (self.query, self.key, self.value, *self.memory))
        return plain_attention.attend(query, key, value, (memory[0], memory[1]), self.batch, variant)

    def check(self, variant: Variant) -> None:
        expected = self.expected(variant)
        out = paged.attend(self.query, self.key, self.value, self.pages, self.batch, variant)
        tolerance = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def variant_of(features: str, heads: int, device: torch.device) -> Variant:
    generator = torch.Generator().manual_seed(1)
    return Variant(
        scaling=0.2,
        window=7 if "window" in features else None,
        softcap=1.5 if "cap" in features else None,
        sinks=torch.randn(heads, generator=generator).to(device) if "sinks" in features else None,
    )


MIXED = [Extent(1, 0, 1), Extent(2, 15, 1), Extent(3, 0, 21), Extent(4, 70, 1), Extent(5, 17, 16), Extent(6, 31, 2)]
"""First tokens, the borders of pages and of blocks of keys, and chunks on either side of them."""


@pytest.mark.parametrize("features", ["", "window", "cap", "sinks", "window cap sinks"])
def test_a_mixed_batch_attends_as_dense_attention(features: str, device: torch.device) -> None:
    """Decode rows and prefill chunks of one batch attend as dense attention does, with every feature of a layer."""
    Scene(MIXED, device).check(variant_of(features, 4, device))


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 3, 1), (80, 2, 2), (96, 5, 1), (128, 2, 1), (256, 2, 1)])
def test_head_sizes_and_groups(dim: int, heads: int, kv_heads: int, device: torch.device) -> None:
    """Sizes that are no powers of two are masked: of a head and of a group of heads."""
    extents = [Extent(1, 33, 1), Extent(2, 14, 5)]
    Scene(extents, device, heads=heads, kv_heads=kv_heads, dim=dim).check(variant_of("", heads, device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_numbers_are_summed_in_float32(dtype: torch.dtype, device: torch.device) -> None:
    """Sums are float32, so that results are as near as the type's own rounding allows."""
    Scene(MIXED, device, dtype=dtype).check(variant_of("", 4, device))


@pytest.mark.parametrize("seed", range(4))
def test_random_layouts_attend_as_dense_attention(seed: int, device: torch.device) -> None:
    """Whatever the lengths, the windows and where chunks are cut."""
    chance = random.Random(seed)
    extents = []
    for sid in range(4):
        count = chance.choice([1, 1, 2, chance.randrange(1, 40)])
        extents.append(Extent(sid, chance.randrange(PAGE * WIDTH - count), count))
    window = chance.choice([None, 1, chance.randrange(2, 100)])
    Scene(extents, device, dim=16, seed=seed).check(Variant(0.3, window=window))


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("features", ["", "window sinks"])
def test_splits_change_nothing(splits: int, features: str, device: torch.device) -> None:
    """However the keys are split, also where most parts are empty, decode has the same result."""
    scene = Scene([Extent(1, 0, 1), Extent(2, 127, 1), Extent(3, 64, 1)], device)
    variant = variant_of(features, 4, device)
    expected = scene.expected(variant)
    paged.attend(scene.query, scene.key, scene.value, scene.pages, scene.batch, variant)
    out = torch.empty(3, 4, 32, device=device)
    decode(scene.query, out, scene.pages, scene.batch, variant, splits=splits)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
def test_rows_that_fill_up_a_bucket(splits: int, device: torch.device) -> None:
    """They store nothing, attend nothing, come out as numbers, and leave the others as they are."""
    scene = Scene([Extent(1, 20, 1), Extent(2, 3, 1), Extent(3, 40, 1)], device)
    owners = scene.batch.owners.clone()
    owners[1] = -1
    scene.batch = PagedBatch(
        scene.batch.tables, owners, scene.batch.positions, torch.arange(len(owners), device=device)
    )
    variant = variant_of("sinks", 4, device)
    expected, before = scene.expected(variant), scene.memory.clone()
    paged.attend(scene.query, scene.key, scene.value, scene.pages, scene.batch, variant)
    out = torch.full((3, 4, 32), 7.0, device=device)
    decode(scene.query, out, scene.pages, scene.batch, variant, splits=splits)
    torch.testing.assert_close(out[[0, 2]].double(), expected[[0, 2]], rtol=1e-5, atol=1e-5)
    assert (out[1] == 0).all()
    changed = (scene.memory.nan_to_num(5.0) != before.nan_to_num(5.0)).any(-1).sum()
    assert changed == 2 * 2 * 2  # keys and values, two heads, two tokens


def test_the_store_changes_only_the_new_places(device: torch.device) -> None:
    """The kernel stores what plain torch stores, bit for bit, and moves nothing else."""
    scene = Scene(MIXED, device, dim=80)
    other = scene.memory.clone()
    variant = variant_of("", 4, device)
    plain_attention.attend(scene.query, scene.key, scene.value, (other[0], other[1]), scene.batch, variant)
    paged.attend(scene.query, scene.key, scene.value, scene.pages, scene.batch, variant)
    assert torch.equal(scene.memory.view(torch.int32), other.view(torch.int32))


def test_the_control_sees_a_wrong_window(device: torch.device) -> None:
    """The comparison can fail: a window that is off by one is found."""
    scene = Scene(MIXED, device)
    expected = scene.expected(Variant(0.2, window=8))
    out = paged.attend(scene.query, scene.key, scene.value, scene.pages, scene.batch, Variant(0.2, window=7))
    assert (out.double() - expected).abs().max() > 1e-2


def test_splits_and_tiles_follow_rows_and_heads(device: torch.device) -> None:
    """Few rows are split often, many not at all; wide heads read fewer keys at once."""
    cpu = torch.device("cpu")
    assert [splits_for(rows, 2, cpu) for rows in (1, 2, 4, 64)] == [4, 2, 1, 1]
    assert [keys_at_once(dim, torch.bfloat16) for dim in (64, 128, 256)] == [64, 64, 32]
    assert keys_at_once(256, torch.float32) == 16
