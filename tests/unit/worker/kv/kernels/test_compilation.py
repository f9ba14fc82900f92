"""Triton kernels compile without a GPU: the interpreter would not notice a wrong type."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel here")


def test_every_kernel_compiles(tmp_path: Path) -> None:
    """For Hopper, with the sizes of a tiny model; none of them needs more registers than there are."""
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", "ops.bench.engine.kernels", "--dim", "16"],
        env=settings | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    lines = [line.split() for line in process.stdout.splitlines()[1:]]
    names = ["_decode", "_reduce", "_prefill", "_store", "_rms_norm", "_gated", "_rotary"]
    assert [line[0] for line in lines] == names
    assert all(int(line[-2]) > 0 and int(line[-1]) == 0 for line in lines)
