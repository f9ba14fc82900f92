"""A fingerprint names weights: the same for copies, another for whatever was trained, retyped or reshaped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import make
from worker.repository.files import inspect
from worker.repository.fingerprint import fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"))


def test_a_copy_has_the_same(folder: Path, tmp_path: Path) -> None:
    """Neither the place nor the time of the files matters."""
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copy)
    assert fingerprint(inspect(folder), "auto") == fingerprint(inspect(tmp_path / "copy"), "auto")


def test_one_tensor_trained_on_is_another(folder: Path, tmp_path: Path) -> None:
    """A small change all over one tensor is seen; so is another type of numbers for the same file."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    name = sorted(tensors)[-2]
    tensors[name] = tensors[name] * (1 + torch.finfo(tensors[name].dtype).eps * 4)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    names = {fingerprint(inspect(folder), "auto"), fingerprint(inspect(copy), "auto")}
    assert len(names | {fingerprint(inspect(folder), "float64")}) == 3


def test_packed_weights_are_others(folder: Path) -> None:
    """A request is never continued on weights that were packed in another way."""
    names = {fingerprint(inspect(folder), "auto", quant) for quant in (None, "f16", "int8")}
    assert len(names) == 3
