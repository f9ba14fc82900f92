"""Tensors are read from mapped files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

from control.errors import ModelFilesError
from worker.tensors import as_tensor, torch_type
from worker.weights.checkpoint import TYPES, Checkpoint
from worker.weights.safetensors_header import read_headers

MIB = 2**20


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("kind", sorted(TYPES.values(), key=str), ids=str)
def test_tensors_are_those_that_were_saved(kind: np.dtype[Any], tmp_path: Path) -> None:
    """Every type, whole and in parts, a single number and an empty tensor too."""
    table = (torch.arange(60).view(6, 10) % 7).to(torch_type(kind))
    saved = {"table": table, "one": table[0, 1].clone(), "none": table[:0].clone()}
    save_file(saved, tmp_path / "a.safetensors")
    with Checkpoint(read_headers([tmp_path / "a.safetensors"])) as checkpoint:
        for name, tensor in saved.items():
            read = checkpoint.read(name)
            assert read.dtype == kind and read.shape == tensor.shape
            assert torch.equal(as_tensor(read).float(), tensor.float())
        rows = as_tensor(checkpoint.read("table", 0, [(1, 3), (5, 6)])).float()
        assert torch.equal(rows, table.float()[[1, 2, 5]])
        assert torch.equal(as_tensor(checkpoint.read("table", 1, [(2, 9)])).float(), table.float()[:, 2:9])
        assert checkpoint.read_share == 1.0


def test_memory_of_what_was_read_is_given_back(tmp_path: Path) -> None:
    """A tensor's pages are resident once it was read, not after a release, and its view reads the file again."""
    save_file({"large": torch.ones(16 * MIB)}, tmp_path / "a.safetensors")
    with Checkpoint(read_headers([tmp_path / "a.safetensors"])) as checkpoint:
        before = resident()
        large = checkpoint.read("large")
        assert large.sum() == 16 * MIB
        assert resident() - before > 48 * MIB
        checkpoint.release()
        assert resident() - before < 16 * MIB
        assert large[-1] == 1


@pytest.mark.parametrize(
    ("written", "wrong", "message"),
    [
        (b"[0,32]", b"[0,64]", r"tensor a is F32 of shape \[8\] and has 64 bytes"),
        (b"[0,32]", b"[1,33]", "cut short: "),
        (b"[8]", b"[-8]", r"tensor a has the shape \[-8\]"),
        (b'"F32"', b'"F99"', "tensor a has the unknown type F99"),
        (b"[32,64]", b"[31,63]", "the tensors a and b overlap at byte"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, written: bytes, wrong: bytes, message: str) -> None:
    """A tensor whose place is outside of the file or another tensor's, or does not fit its type and shape."""
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(8)} | ({"b": torch.ones(8)} if written == b"[32,64]" else {}), path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip(b" ")
    assert written in header
    header = header.replace(written, wrong)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    with pytest.raises(ModelFilesError, match=rf"a\.safetensors.*{message}"):
        read_headers([path])
