"""The structure of packed modules is restored or refused."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16

from worker.collective import Solo
from worker.collective.base import Link
from worker.models.native.module import Module, Unfilled
from worker.native.library import Threads
from worker.weights.structure import NUMBERS, Unknown, put_together, taken_apart


class NoThreads(Threads):
    """Stands for those of the reader."""

    def __init__(self) -> None: ...

    def __del__(self) -> None: ...


THREADS = NoThreads()


def again(contents: Any) -> Any:
    structure, arrays = taken_apart(contents)
    return put_together(structure, arrays, THREADS, Link(Solo()))


def test_values_come_back_and_stay_shared() -> None:
    """Every kind of value; an object that is there twice is one object again, a cycle too."""
    shared = [1.5, float("inf"), True, None, "a", (1, 2), {3}, frozenset({4})]
    whole: dict[Any, Any] = {
        "one": shared,
        2: shared,
        "types": [Unfilled, np.dtype(bfloat16)],
    }
    whole |= {"ordered": OrderedDict(a=1), "default": defaultdict(list, {"b": [2]})}
    whole["itself"] = whole
    found = again(whole)
    assert found["one"] == shared and found["one"] is found[2] and found["itself"] is found
    assert found["types"] == whole["types"] and found["ordered"] == whole["ordered"]
    assert found["default"]["c"] == [] and type(found["ordered"]) is OrderedDict


def test_a_module_comes_back_with_its_methods() -> None:
    """Its numbers are the reader's arrays; a bound method and a partial belong to the new module."""
    weight = np.arange(4.0)
    norm: Any = Module()
    norm.weight = weight
    module: Any = Module()
    module.norm = norm
    module.places = Unfilled((2, 3))
    found, at, bound = again([module, partial(module.at, "norm.weight"), module.at])
    assert found is not module and dict(found.numbers())["places"] == Unfilled((2, 3))
    assert np.array_equal(found.norm.weight, weight) and at() is found.norm.weight
    assert bound.__self__ is found and found.bytes == weight.nbytes


def test_arrays_come_back_and_stay_shared() -> None:
    """Each type that is kept; an array that is there twice is one array again; tensors of torch are refused."""
    arrays = [np.arange(6).reshape(2, 3).astype(dtype) for dtype in NUMBERS.values()]
    same, found = again([arrays, arrays[0]]), again(arrays)
    assert same[0][0] is same[1]
    for one, other in zip(arrays, found, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    with pytest.raises(Unknown):
        taken_apart([torch.zeros(2)])


@pytest.mark.parametrize(
    "value", [np.array(["a"], object), print, lambda: 0, object(), Exception, ModuleNotFoundError("x"), 1j]
)
def test_what_is_on_no_list_is_not_written(value: object) -> None:
    with pytest.raises((Unknown, TypeError)):
        taken_apart([value])


@pytest.mark.parametrize(
    "structure",
    [
        ["class", "os", "system"],
        ["class", "subprocess", "Popen"],
        ["class", "worker.weights.structure", "import_module"],
        ["class", "worker.weights.structure", "Link"],  # another module's
        ["class", "worker.weights.cache", "Path"],
        ["class", "worker.nothing", "Here"],
        ["class", "", "dict"],
        ["object", 0, ["subprocess", "Popen"], None],
        ["method", ["list", 0, []], "append"],
        ["method", ["object", 0, ["worker.models.native.module", "Module"], ["dict", 1, None, []]], "__init__"],
        ["dtype", "object"],
        ["array", 0, 9],
        ["class", "torch.nn.modules.linear", "Linear"],
        ["dtype", "torch.float16"],
        ["met", 3],
        ["call", "os.system", "true"],
        [],
        {"a": 1},
    ],
)
def test_a_file_with_anything_else_is_refused(structure: Any) -> None:
    with pytest.raises(Unknown):
        put_together(msgspec.json.encode(structure), [], THREADS, Link(Solo()))
