"""Packed weights from the cache give the same bits; and nothing but them is taken."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import quantized
from tests.integration.worker.engine.kept_weights import (
    DAMAGED,
    HIT,
    KEPT,
    Checkpoint,
    loaded,
    logits,
    memory,
    the_file,
)
from worker.families.registry import FAMILIES
from worker.models import loading
from worker.native.library import load_library
from worker.repository.files import inspect
from worker.repository.fingerprint import SAMPLE_BYTES, fingerprint
from worker.weights import cache as weight_cache

pytestmark = [
    pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2"),
    pytest.mark.usefixtures("weights"),
]


@pytest.mark.parametrize(
    ("family", "quant"),
    [
        *((family, "int8") for family, record in sorted(FAMILIES.items()) if record.is_native),
        ("gemma3_text", None),
        ("qwen3_moe", "q4k"),
        ("gpt_oss", "q4k"),
    ],
)
def test_a_hit_gives_the_bits_of_a_miss(
    family: str, quant: str | None, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's tensors are not read, and the next step has the same logits to the bit."""
    first, logs = loaded(checkpoint(family), quant)
    assert KEPT in logs and HIT not in logs
    monkeypatch.setattr(loading.NativeLoader, "fill", None)
    second, logs = loaded(checkpoint(family), quant)
    assert HIT in logs and KEPT not in logs
    assert torch.equal(logits(first), logits(second))
    assert first.weight_bytes == second.weight_bytes


def test_a_quantized_checkpoint_is_kept_as_it_is_stored(tmp_path: Path) -> None:
    """Codes of 8 bits with their scales and sums (W8A8) give the same bits from the cache."""
    stored, _ = quantized.write(tmp_path, "w8a8")
    (first, logs), (second, again) = (loaded(stored, None) for _ in range(2))
    assert KEPT in logs and HIT in again
    assert torch.equal(logits(first), logits(second))


def test_each_rank_has_its_own(checkpoint: Checkpoint, weights: Path) -> None:
    source = checkpoint("qwen3")
    first = [loaded(source, rank=rank, ranks=2)[0] for rank in range(2)]
    assert len(list(weights.iterdir())) == 2
    for rank, model in enumerate(first):
        again, logs = loaded(source, rank=rank, ranks=2)
        assert HIT in logs
        assert all(map(torch.equal, memory(model), memory(again)))
    assert not all(map(torch.equal, memory(first[0]), memory(first[1])))


@pytest.mark.parametrize(
    "other", ["file", "config", "tp", "rank", "quant", "library", "code"], ids=lambda word: f"other {word}"
)
def test_what_was_made_of_something_else_is_not_taken(
    other: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    given: dict[str, Any] = {"rank": 1, "ranks": 2}
    assert KEPT in loaded(source, **given)[1]
    assert HIT in loaded(source, **given)[1]
    match other:
        case "file":
            shutil.copy(source / "model.safetensors", tmp_path / "copy")
            (tmp_path / "copy").replace(source / "model.safetensors")
        case "config":
            config = source / "config.json"
            config.write_text(
                config.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 511')
            )
        case "tp":
            given = {}
        case "rank":
            given["rank"] = 0
        case "quant":
            given["quant"] = "f16"
        case "library":
            monkeypatch.setattr(load_library(), "_name", "/cache/native-0123.so")
        case _:
            monkeypatch.setattr(weight_cache, "_code", lambda: "0123")
    assert HIT not in loaded(source, **given)[1]


def test_a_file_that_was_changed_in_place_is_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """With its size and modification time restored, and a change that no sample of the fingerprint sees."""
    source = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    before = fingerprint(inspect(source), "float32", "int8")
    first = loaded(source)[0]
    path = source / "model.safetensors"
    stat, data = path.stat(), bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little")
    begin = json.loads(data[8 : 8 + header])["model.embed_tokens.weight"]["data_offsets"][0]
    data[8 + header + begin + SAMPLE_BYTES + 3] ^= 0x80  # the sign of the first number behind the first sample
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert fingerprint(inspect(source), "float32", "int8") == before
    second, logs = loaded(source)
    assert HIT not in logs
    assert not all(map(torch.equal, memory(first), memory(second)))


def test_files_that_change_during_the_load_are_not_kept(
    checkpoint: Checkpoint, tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    fill = loading.NativeLoader.fill

    def filled(loader: Any, *arguments: Any) -> None:
        fill(loader, *arguments)
        os.utime(source / "model.safetensors")

    monkeypatch.setattr(loading.NativeLoader, "fill", filled)
    assert KEPT not in loaded(source)[1]
    assert not weights.exists()


def flipped(place: float) -> Callable[[Path], None]:
    """Damage of a bit at this share of a file."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(place * (len(data) - 1))] ^= 1
        path.write_bytes(data)

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "magic": flipped(0),
    "a former release": lambda path: path.write_bytes(b"FURROW\x00\x01" + path.read_bytes()[8:]),
    "header": flipped(0.001),
    "tensors": flipped(0.7),
    "last byte": flipped(1),
    "shorter": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "empty": lambda path: os.truncate(path, 0),
    "beginning alone": lambda path: os.truncate(path, 15),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),  # as after a loss of power
    "an enormous header": lambda path: path.write_bytes(weight_cache.MAGIC + b"\xff" * 100),
}


@pytest.mark.parametrize("kind", list(DAMAGES))
def test_a_damaged_file_is_written_again(kind: str, checkpoint: Checkpoint, weights: Path) -> None:
    first = loaded(checkpoint("llama"))[0]
    DAMAGES[kind](the_file(weights))
    second, logs = loaded(checkpoint("llama"))
    assert DAMAGED in logs and KEPT in logs
    assert all(map(torch.equal, memory(first), memory(second)))
    assert HIT in loaded(checkpoint("llama"))[1]


def test_every_byte_that_is_read_is_checked(checkpoint: Checkpoint, weights: Path) -> None:
    """But those of the gaps between tensors, which nothing reads."""
    first = loaded(checkpoint("llama"))[0]
    path = the_file(weights)
    whole, found = path.read_bytes(), 0
    for place in range(0, len(whole), len(whole) // 25):
        data = bytearray(whole)
        data[place] ^= 0x80
        path.write_bytes(data)
        model, logs = loaded(checkpoint("llama"))
        assert all(map(torch.equal, memory(first), memory(model)))
        found += DAMAGED in logs
    assert found > 20


def test_control_without_checksums_damage_is_served(
    checkpoint: Checkpoint, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache.zlib, "crc32", lambda data: 0)
    first = loaded(checkpoint("llama"))[0]
    DAMAGES["tensors"](the_file(weights))
    second, logs = loaded(checkpoint("llama"))
    assert HIT in logs
    assert not all(map(torch.equal, memory(first), memory(second)))


def test_another_models_file_is_not_taken(checkpoint: Checkpoint, weights: Path) -> None:
    loaded(checkpoint("llama"))
    path = the_file(weights)
    foreign = path.read_bytes()
    path.unlink()
    loaded(checkpoint("mistral"))
    the_file(weights).write_bytes(foreign)
    assert DAMAGED in loaded(checkpoint("mistral"))[1]
