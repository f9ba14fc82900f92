"""Triton's fused multiply-add is switched on before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["worker.kv.torch", "worker.models.torch.kernels"])
def test_a_package_of_kernels_sets_the_default(package: str) -> None:
    """Kernels would otherwise compute other bits with a Triton of another default."""
    program = f"import os, {package}; print(os.environ['TRITON_DEFAULT_FP_FUSION'])"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_DEFAULT_FP_FUSION"}
    process = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=50
    )
    assert process.stdout == "1\n", process.stderr
