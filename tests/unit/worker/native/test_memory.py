"""Zeroed memory costs nothing until touched."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from ml_dtypes import bfloat16

from worker.native import memory
from worker.native.memory import LARGE_PAGE, LEAST_SHARED, SPARE_BYTES, Spare, clear, zeros


@pytest.mark.parametrize("kind", [np.float32, bfloat16, np.int8])
def test_small_and_large_ones_are_zero_and_of_the_type(kind: type[Any]) -> None:
    """Zeroed memory comes from numpy or from the kernel."""
    for count in (7, 2 * LARGE_PAGE):
        there = zeros(count, kind)
        assert there.dtype == kind and there.shape == (count,) and not there.any()


def test_spare_memory_is_used_again_when_nobody_has_it() -> None:
    """An array is not overwritten while a view of it is held, larger ones get larger memory, and immense ones are not
    kept."""
    spare = Spare()
    first = spare.empty((3, 70), np.float32)
    place = first.ctypes.data
    first[:] = 1
    row = first[1]
    del first
    second = spare.empty((3, 70), np.float32)
    second[:] = 2
    assert (row == 1).all() and second.ctypes.data != place
    place = second.ctypes.data
    del row, second
    third = spare.empty((2, 90), np.float32)
    assert third.ctypes.data == place and third.ctypes.data % 64 == 0
    del third
    assert spare.empty((1000, 70), np.float32).nbytes == 280_000
    before = psutil.Process().memory_info().rss
    spare.empty((SPARE_BYTES,), np.uint8)[:] = 1
    assert psutil.Process().memory_info().rss - before < SPARE_BYTES / 2


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


@pytest.mark.skipif(sys.platform != "linux", reason="mremap is Linux's")
def test_a_mapped_file_moves_to_memory_of_its_own_under_its_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader sees the same bytes all the time, the place stays, and the file may change or go then."""
    monkeypatch.setattr(memory, "MOVED", 2 * memory.LARGE_PAGE)
    contents = np.random.default_rng(1).integers(0, 255, 11 * memory.LARGE_PAGE // 2 + 5, np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(bytes(mmap.PAGESIZE) + contents.tobytes())
    with path.open("rb") as file:
        mapped = memory.mapped(file.fileno(), mmap.PAGESIZE, len(contents))
    place, wrong, stopping = mapped.ctypes.data, list[int](), threading.Event()
    assert place % memory.LARGE_PAGE == 0

    def read() -> None:
        while not stopping.is_set():
            wrong.append(int((mapped != contents).sum()))

    reader = threading.Thread(target=read)
    reader.start()
    pauses = list[int]()
    memory.move_to_large_pages(mapped, lambda: pauses.append(1))
    stopping.set()
    reader.join(20)
    assert sum(wrong) == 0 and len(pauses) == 3 and mapped.ctypes.data == place
    os.truncate(path, 0)
    assert (mapped == contents).all(), "nothing is read of the file any more"
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in lines if line.endswith(str(path))]


@pytest.mark.skipif(sys.platform != "linux", reason="mremap is Linux's")
def test_what_is_moved_can_be_released(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(8 * memory.LARGE_PAGE))
    before = psutil.Process().memory_info().rss
    for _ in range(20):
        with path.open("rb") as file:
            mapped = memory.mapped(file.fileno(), 0, 8 * memory.LARGE_PAGE)
        memory.move_to_large_pages(mapped, lambda: None)
        del mapped
    assert psutil.Process().memory_info().rss - before < 10 * 8 * memory.LARGE_PAGE
