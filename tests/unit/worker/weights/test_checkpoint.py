"""Tensors that are read from mapped files."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from control.errors import ModelFilesError
from worker.weights.checkpoint import TYPES, Checkpoint

MIB = 2**20


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("kind", sorted(TYPES.values(), key=str), ids=str)
def test_tensors_are_those_that_were_saved(kind: torch.dtype, tmp_path: Path) -> None:
    """Every type, whole and in parts, a single number and an empty tensor too."""
    table = (torch.arange(60).view(6, 10) % 7).to(kind)
    saved = {"table": table, "one": table[0, 1].clone(), "none": table[:0].clone()}
    save_file(saved, tmp_path / "a.safetensors")
    with Checkpoint([tmp_path / "a.safetensors"]) as checkpoint:
        for name, tensor in saved.items():
            read = checkpoint.read(name)
            assert read.dtype == kind and read.shape == tensor.shape
            assert torch.equal(read.float(), tensor.float())
        rows = checkpoint.read("table", 0, [(1, 3), (5, 6)]).float()
        assert torch.equal(rows, table.float()[[1, 2, 5]])
        assert torch.equal(checkpoint.read("table", 1, [(2, 9)]).float(), table.float()[:, 2:9])
        assert checkpoint.read_share == 1.0


def test_memory_of_what_was_read_is_given_back(tmp_path: Path) -> None:
    """A tensor's pages are resident once it was read, not after a release, and its view reads the file again."""
    save_file({"large": torch.ones(16 * MIB)}, tmp_path / "a.safetensors")
    with Checkpoint([tmp_path / "a.safetensors"]) as checkpoint:
        before = resident()
        large = checkpoint.read("large")
        assert large.sum() == 16 * MIB
        assert resident() - before > 48 * MIB
        checkpoint.release()
        assert resident() - before < 16 * MIB
        assert large[-1] == 1


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    """A tensor whose place is outside of the file."""
    save_file({"a": torch.ones(8)}, tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(content.replace(b"[0,32]", b"[0,64]"))
    with (
        pytest.raises(ModelFilesError, match=r"a\.safetensors can't be read"),
        Checkpoint([tmp_path / "a.safetensors"]),
    ):
        pass
