"""Trials of the C++ library: its own check, and products over the model's widths with each kind of weights."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from worker.models.torch.layers import NativeLinear
from worker.native.host import thread_count
from worker.native.library import Threads, load_library
from worker.selftest.trial import NotAvailable, TrialCase, TrialRequest

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
MOST_WEIGHTS = 2**24
"""Of a product; the outputs of wider ones are cut, as float64 has to follow."""
INT8_TOLERANCE = 3e-2


def cpp(request: TrialRequest) -> Iterator[TrialCase]:
    if request.device.type != "cpu":
        raise NotAvailable("it computes on CPUs")
    loaded = load_library()
    if loaded is None:
        raise NotAvailable("there is no library: the log of a rank has the reason")
    shapes = request.shapes
    numbers = (ctypes.c_int64 * len(shapes.on_cpu))(*shapes.on_cpu)
    wrong: bytes | None = loaded.furrow_check(numbers, len(numbers))
    if wrong is not None:
        raise RuntimeError(wrong.decode())
    threads = Threads(loaded, thread_count())
    widths = [(shapes.hidden, (shapes.heads + 2 * shapes.kv_heads) * shapes.head_dim), (shapes.inner, shapes.hidden)]
    for inputs, outputs in widths:
        for kind in KINDS:
            for rows in (1, 16):
                yield _product(request, inputs, min(outputs, MOST_WEIGHTS // inputs), kind, rows, threads)


def _product(
    request: TrialRequest, inputs: int, outputs: int, kind: torch.dtype, rows: int, threads: Threads
) -> TrialCase:
    weights = request.random(outputs, inputs).float()
    stored = weights if kind == torch.int8 else weights.to(kind)
    linear = NativeLinear([stored], None, [kind], threads)
    x = request.random(rows, inputs).float()
    expected = x.double() @ stored.double().t()
    return TrialCase(
        f"{rows} x {inputs} x {outputs}, {str(kind).removeprefix('torch.')} weights",
        torch.float32,
        lambda: linear(x),
        expected,
        bytes=linear.packed_bytes if rows == 1 else 0,
        flops=2 * rows * inputs * outputs if rows > 1 else 0,
        tolerance=INT8_TOLERANCE if kind == torch.int8 else None,
    )
