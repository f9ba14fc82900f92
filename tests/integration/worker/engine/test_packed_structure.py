"""The structure of packed modules: what comes back, and that a file with anything else is refused."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16
from torch import nn

from worker.collective import Solo
from worker.collective.link import Link
from worker.models.kept_tensors import register
from worker.native.library import Threads
from worker.weights.structure import FORMS, NUMBERS, Unknown, put_together, taken_apart


class NoThreads(Threads):
    """Stands for those of the reader."""

    def __init__(self) -> None: ...

    def __del__(self) -> None: ...


THREADS = NoThreads()


@pytest.fixture(autouse=True)
def forms() -> None:
    register()


def again(contents: Any) -> Any:
    structure, arrays = taken_apart(contents)
    return put_together(structure, arrays, THREADS, Link(Solo()))


def test_values_come_back_and_stay_shared() -> None:
    """Every kind of value; an object that is there twice is one object again, a cycle too."""
    shared = [1.5, float("inf"), True, None, "a", (1, 2), {3}, frozenset({4})]
    whole: dict[Any, Any] = {
        "one": shared,
        2: shared,
        "types": [torch.float16, torch.device("cpu"), nn.Linear, np.dtype(bfloat16)],
    }
    whole |= {"ordered": OrderedDict(a=1), "default": defaultdict(list, {"b": [2]})}
    whole["itself"] = whole
    found = again(whole)
    assert found["one"] == shared and found["one"] is found[2] and found["itself"] is found
    assert found["types"] == whole["types"] and found["ordered"] == whole["ordered"]
    assert found["default"]["c"] == [] and type(found["ordered"]) is OrderedDict


def test_a_module_comes_back_with_its_methods() -> None:
    """Its parameters are the reader's tensors; a bound method and a partial belong to the new module."""
    module = nn.Sequential(nn.Linear(3, 2), nn.RMSNorm(2))
    found, call, bound = again([module, partial(module.forward), module.forward])
    given = torch.randn(4, 3)
    assert found is not module and torch.equal(found(given), module(given))
    assert torch.equal(call(given), module(given)) and bound.__self__ is found


def test_arrays_come_back_and_stay_shared() -> None:
    """Each type that is kept; an array that is there twice is one array again, and tensors need their form."""
    arrays = [np.arange(6).reshape(2, 3).astype(dtype) for dtype in NUMBERS.values()]
    same, found = again([arrays, arrays[0]]), again(arrays)
    assert same[0][0] is same[1]
    for one, other in zip(arrays, found, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    FORMS.clear()
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
        ["method", ["object", 0, ["torch.nn.modules.linear", "Linear"], ["dict", 1, None, []]], "_call_impl"],
        ["dtype", "object"],
        ["array", 0, 9],
        ["form", 0, "torch.dtype", "ops"],
        ["form", 0, "tensor", ["array", 1, 9]],
        ["form", 0, "eval", "1"],
        ["met", 3],
        ["call", "os.system", "true"],
        [],
        {"a": 1},
    ],
)
def test_a_file_with_anything_else_is_refused(structure: Any) -> None:
    with pytest.raises(Unknown):
        put_together(msgspec.json.encode(structure), [], THREADS, Link(Solo()))
