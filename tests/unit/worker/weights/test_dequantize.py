"""Blocks become ggml's numbers to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gguf_models import FORMATS, random_blocks
from worker.weights import dequantize as module
from worker.weights.dequantize import FUNCTIONS, dequantize
from worker.weights.stored_matrix import StoredMatrix

KINDS = sorted(FORMATS)


def matrix(kind: str) -> Any:
    return random_blocks(kind, 64 * 4, seed=1).reshape(64, -1)


def ours(kind: str) -> Any:
    return dequantize(StoredMatrix(FORMATS[kind].name, matrix(kind)))


def test_every_format_has_a_function() -> None:
    assert sorted(FUNCTIONS) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_have_the_bits_of_the_package_gguf(kind: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    theirs = gguf.quants.dequantize(matrix(kind), gguf.GGMLQuantizationType(FORMATS[kind].ggml_type))
    assert np.array_equal(ours(kind).view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_have_the_bits_of_the_package_libgguf(kind: str) -> None:
    """It calls ggml's own C functions."""
    libgguf = pytest.importorskip("libgguf", reason="the package libgguf is not installed")
    form = FORMATS[kind]
    theirs = np.asarray(libgguf.dequantize_rows(matrix(kind), form.ggml_type, 4 * form.weights), np.float32)
    assert np.array_equal(ours(kind).view(np.uint32), theirs.reshape(ours(kind).shape).view(np.uint32))


def test_formulas_of_single_blocks() -> None:
    """Written out by hand for one block of each family: the test above needs packages."""
    half = np.array([0.5], np.float16).tobytes()
    block = half + bytes([0x1F] * 16)  # q4_0: 15 below, 1 above
    assert one("q4_0", block) == [0.5 * 7] * 16 + [0.5 * -7] * 16
    block = half + half + bytes([0x21] * 16)
    assert one("q4_1", block) == [1.0] * 16 + [1.5] * 16
    block = half + bytes([0xFF, 0, 0, 0]) + bytes([0x21] * 16)
    assert one("q5_0", block) == [0.5] * 8 + [-7.5] * 8 + [-7.0] * 16
    assert one("q8_0", half + bytes([0xFF] * 32)) == [-0.5] * 32
    block = half + half + bytes([2] * 4 + [1] * 4 + [0] * 4) + bytes([0x43] * 128)
    assert one("q4_k", block)[:64] == [0.5 * 2 * 3 - 0.5] * 32 + [0.5 * 2 * 4 - 0.5] * 32
    assert one("mxfp4", bytes([128]) + bytes([0x97] * 16)) == [12.0] * 16 + [-1.0] * 16
    assert one("iq4_nl", half + bytes([0xF0] * 16)) == [0.5 * -127] * 16 + [0.5 * 113] * 16
    block = half + bytes([2, 0, 1, 0, 0, 0]) + bytes([0x18] * 128)  # the scale 33, then 0
    assert one("iq4_xs", block)[:64] == [0.5] * 16 + [-52.0] * 16 + [-16.0] * 16 + [1664.0] * 16
    block = half + bytes([1] + [0] * 63) + bytes([0] * 8) + bytes([2] + [0] * 31) + bytes([2, 0, 0, 0])
    assert one("iq3_s", block)[:40] == [7.5, -2.5, 2.5, 2.5] + [2.5] * 28 + [0.5] * 8
    assert one("tq2_0", bytes([0b01100011] * 64) + half)[:128] == [1.0] * 32 + [-0.5] * 32 + [0.5] * 32 + [0.0] * 32
    block = bytes([0x21] * 128) + bytes(64) + bytes([1] * 16) + half
    assert one("q6_k", block)[:128] == [0.5 * (1 - 32)] * 64 + [0.5 * (2 - 32)] * 64


def one(kind: str, block: bytes) -> list[float]:
    data = np.frombuffer(block, np.uint8).reshape(1, -1)
    return dequantize(StoredMatrix(FORMATS[kind].name, data))[0].tolist()


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ours("q5_k")
    monkeypatch.setattr(module, "CHUNK", 5 * 4 * 256)
    assert np.array_equal(ours("q5_k"), whole)
