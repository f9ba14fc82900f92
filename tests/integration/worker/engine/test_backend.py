"""A loaded shard names its backend: which code computes it, of which version, and in which type."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.models import make
from worker.collective import Solo
from worker.models.backend import describe
from worker.models.loading import load
from worker.native import compiled
from worker.native.host import SOURCE, SWITCH
from worker.native.library import load_library


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")
def test_the_code_that_computes_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ with its source, instructions, compiler and library of functions; torch's forward with transformers. Another
    load and another quantization have the same kernels."""
    native = describe(load(folder, collective=Solo(), dtype="float32"))
    assert native.batch_invariant and native.dtype == "float32" and native.collective == ""
    assert native.kernels.startswith(f"C++ {compiled.digest(SOURCE)}, AVX")
    assert f"numpy {np.__version__}" in native.kernels and "torch" not in native.kernels
    assert describe(load(folder, collective=Solo(), dtype="auto", quant="int8")) == native
    monkeypatch.setenv(SWITCH, "0")
    plain = describe(load(folder, collective=Solo(), dtype="float32"))
    assert (
        f"torch {torch.__version__}" in plain.kernels
        and "transformers" in plain.kernels
        and "C++" not in plain.kernels
        and not plain.batch_invariant
    )
    assert describe(load(folder, collective=Solo(), dtype="float64")) == msgspec.structs.replace(
        plain, dtype="float64", kv_type="float64"
    )


def test_any_change_of_a_source_is_another_version(tmp_path: Path) -> None:
    """Of a header too, in any folder below; a copy in another place is the same."""
    copy = tmp_path / "source"
    shutil.copytree(SOURCE.parent, copy)
    assert compiled.digest(copy / SOURCE.name) == compiled.digest(SOURCE)
    with (copy / "recurrent" / "delta.h").open("a") as header:
        header.write(" ")
    assert compiled.digest(copy / SOURCE.name) != compiled.digest(SOURCE)
