"""Weights are rounded to 16 bits: a type that they are not stored in."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from worker.models import shard
from worker.models.shard import LARGEST, rounded

BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)


def numbers(shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
    """Of all sizes, with zeros of both signs, infinities and NaN where there is room."""
    spread = np.random.default_rng(7)
    values = spread.standard_normal(shape) * 10.0 ** spread.integers(-9, 9, shape)
    flat = values.reshape(-1)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65519.0, 65520.0, 1e30]
    flat[: len(special)] = special[: len(flat)]
    with np.errstate(over="ignore"):
        return values.astype(kind)


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (7,), (40, 33), (3, 5, 8)])
@pytest.mark.parametrize("kind", [np.float64, np.float32, BFLOAT16, FLOAT16])
@pytest.mark.parametrize("storage", [BFLOAT16, FLOAT16])
def test_rounding_saturates(
    shape: tuple[int, ...], kind: Any, storage: np.dtype[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks and threads as in one piece: to the nearest number, and to the largest instead of infinity."""
    monkeypatch.setattr(shard, "_BLOCK", 64)
    weights = numbers(shape, kind)
    most = LARGEST[storage.name]
    wide = weights.astype(np.float64 if kind is np.float64 else np.float32)
    expected = np.clip(wide, -most, most).astype(storage)
    result = rounded(weights, storage)
    assert result.dtype == storage and result.shape == shape
    assert np.array_equal(result.view(np.uint16), expected.view(np.uint16))
    assert not np.isinf(result.astype(np.float32)).any()


def test_columns_of_a_larger_matrix_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's share may be a view whose rows do not lie one after the other."""
    monkeypatch.setattr(shard, "_BLOCK", 64)
    whole = numbers((50, 32), np.float32)
    assert np.array_equal(
        rounded(whole[:, 8:24], FLOAT16).view(np.uint16),
        np.ascontiguousarray(rounded(whole, FLOAT16)[:, 8:24]).view(np.uint16),
    )


def test_numbers_in_their_own_type_stay() -> None:
    weights = numbers((4, 4), np.float32)
    assert rounded(weights, None) is weights
