"""A case of a trial, and its judgement."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.selftest.records import Result

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference to float64, as a part of the largest value (at least 1)."""
MEASURED_S = 0.1
"""Of all calls of a case."""
MOST_CALLS = 50
CAPTURED_CALLS = 20
"""Of a kernel in one graph."""


@dataclass(frozen=True)
class Case:
    """`compute` runs the kernel and returns what it computed; `expected` is the same from plain torch in float64."""

    shape: str
    dtype: torch.dtype
    compute: Callable[[], Tensor]
    expected: Tensor
    bytes: int = 0
    flops: int = 0
    tolerance: float | None = None
    """Default: by `dtype`."""


def judge(kernel: str, case: Case, device: torch.device, measured: bool) -> Result:
    """Compute once and compare; with `measured` compute again and again, and time it."""
    dtype = str(case.dtype).removeprefix("torch.")
    ours = case.compute().double().cpu()
    scale = max(1.0, float(case.expected.abs().max())) if case.expected.numel() else 1.0
    if ours.shape != case.expected.shape:
        detail = f"by its shape: {tuple(ours.shape)} instead of {tuple(case.expected.shape)}"
        return Result(kernel, case.shape, dtype, "differs", detail)
    error = float((ours - case.expected).abs().max()) / scale if ours.numel() else 0.0
    allowed = TOLERANCE[case.dtype] if case.tolerance is None else case.tolerance
    if not error <= allowed:  # NaN is a difference
        detail = f"by {error:.2g} of the largest value; {allowed:g} is allowed"
        return Result(kernel, case.shape, dtype, "differs", detail)
    if not measured:
        return Result(kernel, case.shape, dtype, "ok")
    is_kernel = kernel.startswith("triton.") and device.type == "cuda"
    seconds = timed_in_graph(case.compute, device) if is_kernel else timed(case.compute, device)
    return Result(kernel, case.shape, dtype, "ok", "", seconds, case.bytes / 1e9, case.flops / 1e12)


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
        begun, calls = time.perf_counter(), 0
        while calls < MOST_CALLS and time.perf_counter() - begun < MEASURED_S / 3:
            compute()
            calls += 1
        _wait(device)
        best = min(best, (time.perf_counter() - begun) / calls)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
