"""Memory that is zero and costs nothing until it is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import psutil
import pytest
from ml_dtypes import bfloat16

from worker.native.memory import LARGE_PAGE, LEAST_SHARED, clear, zeros


@pytest.mark.parametrize("kind", [np.float32, bfloat16, np.int8])
def test_small_and_large_ones_are_zero_and_of_the_type(kind: type[Any]) -> None:
    """Zeroed memory comes from numpy or from the kernel."""
    for count in (7, 2 * LARGE_PAGE):
        there = zeros(count, kind)
        assert there.dtype == kind and there.shape == (count,) and not there.any()


def test_what_is_not_written_is_not_resident() -> None:
    """256 MiB, of which one number is written, take next to nothing."""
    process = psutil.Process()
    before = process.memory_info().rss
    there = zeros(2**26, np.float32, large=False)
    there[2**25] = 1.0
    assert process.memory_info().rss - before < 2**24
    assert float(there[2**25 - 1 : 2**25 + 2].sum()) == 1.0


def test_small_ones_share_a_large_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices of experts are small, and so are the pages that they would get one by one."""
    monkeypatch.setattr("worker.native.memory._rest", np.empty(0, np.uint8))
    several = [zeros(count, np.int8) for count in (LEAST_SHARED, 3 * LEAST_SHARED + 1, LEAST_SHARED)]
    for number, one in enumerate(several):
        assert one.ctypes.data % 64 == 0 and not one.any()
        one.fill(number + 1)
    for number, one in enumerate(several):
        assert bool((one == number + 1).all())
    assert {one.ctypes.data // LARGE_PAGE for one in several} == {several[0].ctypes.data // LARGE_PAGE}


@pytest.mark.parametrize("begin", [0, 1, 1000, 1024])
def test_what_is_cleared_is_zero_and_not_resident(begin: int) -> None:
    """The numbers before and behind it stay, also where they share its pages."""
    process, there = psutil.Process(), zeros(2**24, np.float32, large=False)
    there.fill(1.0)
    full = process.memory_info().rss
    clear(there[begin:-begin] if begin else there)
    assert full - process.memory_info().rss > 2**25
    assert float(there.sum()) == 2 * begin
    clear(part := np.ones(3, np.float32))
    assert not part.any()
