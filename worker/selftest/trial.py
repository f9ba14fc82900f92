"""A trial in its child process: its circumstances, its cases and their judgement, and the limits of the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from worker.selftest.records import TrialResult
from worker.selftest.shapes import Shapes

# The circumstances of a trial in a child process: device, shapes, and random numbers of the model's type.


DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class TrialRequest:
    device: torch.device
    shapes: Shapes
    tokens: int
    """Rows of a case, and positions of a context: more are needed to measure than to compare."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.shapes.dtype]

    def random(self, *shape: int) -> Tensor:
        """Equal numbers on every device and in every process, on the device in the model's type."""
        generator = torch.Generator().manual_seed(sum(shape))
        return self.sent(torch.randn(*shape, generator=generator))

    def sent(self, values: Tensor) -> Tensor:
        return values.to(device=self.device, dtype=self.dtype)


class NotAvailable(Exception):
    """A trial has nothing to try on this device; the message says why."""


# A case of a trial, and its judgement.


TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference to float64, as a part of the largest value (at least 1)."""
MEASURED_S = 0.1
"""Of all calls of a case."""
MOST_CALLS = 50
CAPTURED_CALLS = 20
"""Of a kernel in one graph."""


@dataclass(frozen=True)
class TrialCase:
    """`compute` runs the kernel and returns what it computed; `expected` is the same from plain torch in float64."""

    shape: str
    dtype: torch.dtype
    compute: Callable[[], Tensor]
    expected: Tensor
    bytes: int = 0
    flops: int = 0
    tolerance: float | None = None
    """Default: by `dtype`."""


def judge(kernel: str, case: TrialCase, device: torch.device, measured: bool) -> TrialResult:
    """Compute once and compare; with `measured` compute again and again, and time it."""
    dtype = str(case.dtype).removeprefix("torch.")
    ours = case.compute().double().cpu()
    scale = max(1.0, float(case.expected.abs().max())) if case.expected.numel() else 1.0
    if ours.shape != case.expected.shape:
        detail = f"by its shape: {tuple(ours.shape)} instead of {tuple(case.expected.shape)}"
        return TrialResult(kernel, case.shape, dtype, "differs", detail)
    error = float((ours - case.expected).abs().max()) / scale if ours.numel() else 0.0
    allowed = TOLERANCE[case.dtype] if case.tolerance is None else case.tolerance
    if not error <= allowed:  # NaN is a difference
        detail = f"by {error:.2g} of the largest value; {allowed:g} is allowed"
        return TrialResult(kernel, case.shape, dtype, "differs", detail)
    if not measured:
        return TrialResult(kernel, case.shape, dtype, "ok")
    is_kernel = kernel.startswith("triton.") and device.type == "cuda"
    seconds = timed_in_graph(case.compute, device) if is_kernel else timed(case.compute, device)
    return TrialResult(kernel, case.shape, dtype, "ok", "", seconds, case.bytes / 1e9, case.flops / 1e12)


def timed_in_graph(compute: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of a call on a GPU, without the time that the host takes to launch it, which is often longer."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
        for _ in range(CAPTURED_CALLS - 1):
            compute()

    def replay() -> Tensor:
        graph.replay()
        return out

    return timed(replay, device) / CAPTURED_CALLS


def timed(compute: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of a call, the best of three rounds."""
    best = float("inf")
    for _ in range(3):
        _wait(device)
        begun = time.perf_counter()
        calls = 0
        while calls < MOST_CALLS and time.perf_counter() - begun < MEASURED_S / 3:
            compute()
            calls += 1
        _wait(device)
        best = min(best, (time.perf_counter() - begun) / calls)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# The limits of a device, as plain torch reaches them: memory by a copy, arithmetic by a matrix product.


class DeviceLimits(msgspec.Struct, frozen=True):
    gigabytes_per_s: float
    teraflops: float


def measured(device: torch.device, dtype: str) -> DeviceLimits:
    """By the best of three rounds of some 0.07 s each."""
    large = device.type == "cuda"
    source = torch.zeros(2**28 if large else 2**24, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = timed(lambda: target.copy_(source), device)
    width = 8192 if large else 1024
    matrix = torch.zeros(width, width, dtype=DTYPES[dtype], device=device)
    multiplied = timed(lambda: matrix @ matrix, device)
    return DeviceLimits(2 * source.nbytes / copied / 1e9, 2 * width**3 / multiplied / 1e12)
