"""GGUF headers are read or refused by name; and by value."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import pytest

from control.errors import ModelFilesAway, ModelFilesError
from ops.harness.gguf import encode_text
from tests.gguf_models import Stored, write
from worker.weights.gguf import parse, read_header

VECTOR = Stored(0, (8,), bytes(32))
FIELDS: dict[str, Any] = {"general.architecture": "llama", "a": 7, "b": 1.5, "c": True, "d": ["x", "é"], "e": [1, -2]}


def header(tmp_path: Path, fields: dict[str, Any] = FIELDS, **tensors: Stored) -> Any:
    return read_header(write(tmp_path / "a.gguf", fields, tensors))


def test_values_and_tensors_are_read(tmp_path: Path) -> None:
    gguf_header = header(tmp_path, one=VECTOR, two=Stored(8, (3, 64), bytes(3 * 68)))
    assert {key: gguf_header.fields[key] for key in "abc"} == {"a": 7, "b": 1.5, "c": True}
    assert gguf_header.fields["d"].texts() == ["x", "é"] and gguf_header.fields["e"].numbers() == [1, -2]
    two = gguf_header.tensors["two"]
    assert (two.type.name, two.shape, two.bytes) == ("q8_0", (3, 64), 204)
    assert two.start % 32 == 0 and two.start + two.bytes == gguf_header.path.stat().st_size


def test_the_files_own_alignment_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", FIELDS | {"general.alignment": 256}, {"one": VECTOR, "two": VECTOR}, 256)
    assert [one.start % 256 for one in read_header(path).tensors.values()] == [0, 0]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (Stored(0, (0,), b""), "with a dimension of 0"),
        (Stored(0, (2**63, 2), b""), "cut short or damaged: tensor one"),
        (Stored(0, (2**32, 2**32), b""), "cut short or damaged: tensor one"),
        (Stored(0, (1, 1, 1, 1, 1), bytes(4)), "has 5 dimensions"),
        (Stored(8, (4, 33), bytes(400)), "rows of 33 weights, no multiple of the 32"),
        (Stored(22, (4, 256), bytes(4 * 82)), "has type IQ2_S, which is not supported"),
        (Stored(99, (4,), bytes(16)), "has type 99"),
    ],
)
def test_a_tensor_that_can_not_be_is_refused(tmp_path: Path, tensor: Stored, message: str) -> None:
    """False dimensions, products beyond 64 bits, cut blocks and foreign types: the tensor is named."""
    with pytest.raises(ModelFilesError, match=message) as error:
        header(tmp_path, one=tensor)
    assert "tensor one" in str(error.value) and "a.gguf" in str(error.value)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (struct.pack("<IIQ", 9, 8, 2**61), "promises"),
        (struct.pack("<IIQ", 9, 6, 2**62), "the 4611686018427387904 items of bad would end"),
        (struct.pack("<IIQ", 9, 9, 1), "is a list of lists"),
        (struct.pack("<IQ", 8, 2**63), "bad is 9223372036854775808 bytes long"),
        (struct.pack("<IB", 7, 2), "is a bool with the value 2"),
        (struct.pack("<I", 13), "has the unknown type 13"),
        (struct.pack("<IQ", 8, 2) + b"\xff\xff", "is no UTF-8"),
    ],
)
def test_a_field_that_can_not_be_is_refused(tmp_path: Path, field: bytes, message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        header(tmp_path, {"bad": field}, one=VECTOR)


@pytest.mark.parametrize("alignment", [0, 3, 2**31, "32", True, [32]])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path: Path, alignment: object) -> None:
    with pytest.raises(ModelFilesError, match=r"general\.alignment is"):
        header(tmp_path, {"general.alignment": alignment}, one=VECTOR)


def test_names_are_there_once(tmp_path: Path) -> None:
    content = write(tmp_path / "a.gguf", {"abc": 1, "abd": 2}, {"one": VECTOR, "onf": VECTOR}).read_bytes()
    for old, new, what in ((b"abd", b"abc", "field abc twice"), (b"onf", b"one", "tensor one twice")):
        with pytest.raises(ModelFilesError, match=what):
            parse(content.replace(old, new), Path("a.gguf"))


def test_tensors_that_overlap_or_begin_between_are_refused(tmp_path: Path) -> None:
    content = write(tmp_path / "a.gguf", {}, {"one": VECTOR, "two": VECTOR}).read_bytes()
    place = content.index(encode_text("two")) + len(encode_text("two")) + 4 + 8 + 4
    for offset, what in ((0, "one and two overlap"), (8, "begins at 8, no multiple of 32")):
        damaged = content[:place] + struct.pack("<Q", offset) + content[place + 8 :]
        with pytest.raises(ModelFilesError, match=what):
            parse(damaged, Path("a.gguf"))


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (b"GGML" + bytes(40), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "has version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "is big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "promises 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "promises 18446744073709551615 metadata fields"),
    ],
)
def test_another_kind_of_file_is_refused(begin: bytes, message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        parse(begin, Path("a.gguf"))


def test_a_file_that_is_cut_short_may_be_whole_later(tmp_path: Path) -> None:
    """Another try is made, as where a file is still being copied."""
    path = write(tmp_path / "a.gguf", FIELDS, {"one": VECTOR})
    content = path.read_bytes()
    for length in (10, 60, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ModelFilesAway, match="cut short"):
            read_header(path)


def test_a_large_vocabulary_is_read_in_two_seconds(tmp_path: Path) -> None:
    """262,144 tokens with scores, and as many merges."""
    words = [f"▁word{index}" for index in range(262_144)]
    path = write(tmp_path / "a.gguf", {"tokens": words, "scores": [0.5] * len(words), "merges": words}, {"one": VECTOR})
    begin = time.process_time()
    fields = read_header(path).fields
    assert fields["tokens"].texts() == words and len(fields["scores"].numbers()) == len(words)
    assert time.process_time() - begin < 2
