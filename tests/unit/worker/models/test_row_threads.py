"""A step's sequences are divided among threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from worker.models.torch.pooled import LEAST_TOKENS, RowThreads, divided


@pytest.mark.parametrize(
    ("counts", "most", "sums"),
    [
        ([64] * 8, 2, [256, 256]),
        ([64] * 8, 3, [192, 128, 192]),
        ([400, 10, 10, 90], 2, [400, 110]),
        ([10, 10, 90, 400], 2, [110, 400]),
        ([500], 4, [500]),
        ([20] * 4, 4, [80]),
        ([20] * 8, 4, [80, 80]),
        ([128, 1, 1, 1], 4, [128, 3]),
        ([1, 1, 1, 128], 4, [3, 128]),
    ],
)
def test_parts_are_about_equal(counts: list[int], most: int, sums: list[int]) -> None:
    """Each row is in one part, in order."""
    parts = divided(counts, most)
    assert [place for part in parts for place in range(len(counts))[part]] == list(range(len(counts)))
    assert [sum(counts[part]) for part in parts] == sums


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_parts_run_beside_each_other_each_on_one_thread() -> None:
    """Both parts are under way at once, and torch's number of threads is as before for all others."""
    threads, met = RowThreads(2), threading.Barrier(2)

    def compute(rows: slice) -> torch.Tensor:
        met.wait(20)
        return torch.tensor([rows.start, torch.get_num_threads(), int(torch.is_inference_mode_enabled())])

    found = threads.run([LEAST_TOKENS] * 4, compute)
    assert torch.stack(found).tolist() == [[0, 1, 1], [2, 1, 1]]
    assert torch.get_num_threads() == 2
    other = list[int]()
    thread = threading.Thread(target=lambda: other.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert other == [2]


@pytest.mark.usefixtures("two_threads")
def test_an_error_of_a_part_is_the_error_of_all() -> None:
    def compute(rows: slice) -> torch.Tensor:
        raise MemoryError(str(rows.start))

    with pytest.raises(MemoryError):
        RowThreads(2).run([LEAST_TOKENS] * 4, compute)
