"""A fingerprint changes with each part of a backend; and with nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from control.commands import RankBackend
from control.records.backend import Backend, backend_of

RANK = RankBackend(dtype="float32", kernels="C++ 1, AVX2", collective="shared memory", batch_invariant=True)
BACKEND = backend_of("aa", None, False, [RANK, RANK])
OTHERS: dict[str, Any] = {
    "weights": "ab",
    "dtype": "float64",
    "kv_type": "q8_0",
    "quant": "int8",
    "dequantize": True,
    "tp": 3,
    "collective": "gloo",
    "kernels": ["C++ 1, AVX-512"],
    "batch_invariant": False,
    "engine_version": "0.32.0",
}


def test_equal_backends_have_one_fingerprint() -> None:
    """It has the form of OpenAI's, and is the same in every process: here a number that was computed once."""
    assert BACKEND is not None
    again = backend_of("aa", None, False, [msgspec.structs.replace(RANK)] * 2)
    assert again is not BACKEND and again is not None
    assert again.fingerprint == BACKEND.fingerprint == "fp_0d1c267c6e2dd9ee"


@pytest.mark.parametrize("field", msgspec.structs.fields(Backend), ids=lambda field: field.name)
def test_each_field_changes_the_fingerprint(field: msgspec.structs.FieldInfo) -> None:
    """A field that is added needs another value here."""
    assert BACKEND is not None
    changed = msgspec.structs.replace(BACKEND, **{field.name: OTHERS[field.name]})
    assert changed.fingerprint != BACKEND.fingerprint


def test_the_kernels_of_the_ranks_stand_in_their_order() -> None:
    """Equal ones stand once. One rank that any row's company changes is enough for the whole."""
    other = msgspec.structs.replace(RANK, kernels="torch", batch_invariant=False)
    mixed, turned = backend_of("aa", None, False, [RANK, other]), backend_of("aa", None, False, [other, RANK])
    assert BACKEND is not None and mixed is not None and turned is not None
    assert (BACKEND.kernels, BACKEND.tp, BACKEND.batch_invariant) == (["C++ 1, AVX2"], 2, True)
    assert (mixed.kernels, mixed.batch_invariant) == (["C++ 1, AVX2", "torch"], False)
    assert mixed.fingerprint != turned.fingerprint


def test_a_rank_that_tells_nothing_leaves_no_backend() -> None:
    """A rank of an older version, during an upgrade."""
    assert backend_of("aa", None, False, [RANK, None]) is None
