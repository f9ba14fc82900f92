"""The trial of graph capture: what is launched is recorded, and a replay computes with what its buffers hold then."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from worker.engine.torch.graphs import Capture, CudaCapture
from worker.selftest.trial import NotAvailable, TrialCase, TrialRequest


def graphs(request: TrialRequest) -> Iterator[TrialCase]:
    if request.device.type != "cuda":
        raise NotAvailable("graphs are for GPUs")
    yield from captured(request, CudaCapture(request.device))


def captured(request: TrialRequest, capture: Capture) -> Iterator[TrialCase]:
    """A product, a norm and a copy, captured over zeros and replayed over random numbers, in two graphs of one pool."""
    hidden = request.shapes.hidden
    weights = request.random(hidden, hidden) / hidden**0.5
    for rows in (8, 1):
        inputs, out = (torch.zeros(rows, hidden, dtype=request.dtype, device=request.device) for _ in range(2))
        work = _work(inputs, weights, out)
        work()
        graph = capture(work)
        data = request.random(rows, hidden)

        def compute(
            inputs: Tensor = inputs,
            out: Tensor = out,
            data: Tensor = data,
            replay: Callable[[], None] = graph.replay,
        ) -> Tensor:
            inputs.copy_(data)
            replay()
            return out

        yield TrialCase(f"{rows} x {hidden}", request.dtype, compute, (data.double() @ weights.double().t()).cpu())


def _work(inputs: Tensor, weights: Tensor, out: Tensor) -> Callable[[], None]:
    @torch.inference_mode()
    def work() -> None:
        out.copy_(torch.nn.functional.linear(inputs, weights))

    return work
