"""The child process that runs trials. It ends after the first failure: a fault leaves a device's context unusable."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator

import msgspec
import torch

from control.process import die_with_parent
from worker.selftest.records import TrialResult
from worker.selftest.runner import Begun, Done, Message, TrialTask, Tried
from worker.selftest.trial import NotAvailable, TrialCase, TrialRequest, judge


def main() -> None:
    die_with_parent()
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialTask)
    request = TrialRequest(torch.device(task.device), task.shapes, task.tokens)
    if request.device.type == "cuda":
        torch.cuda.set_device(request.device)

    def tell(message: Message) -> None:
        os.write(task.pipe, msgspec.json.encode(message) + b"\n")

    for kernel, place in task.trials.items():
        tell(Begun(kernel))
        for result in tried(kernel, place, request, task.measured):
            tell(Tried(result))
            if not result.works:
                return
        tell(Done(kernel))


@torch.no_grad()
def tried(kernel: str, place: str, request: TrialRequest, measured: bool) -> Iterator[TrialResult]:
    """The results of one trial's cases, up to the first failure."""
    dtype = request.shapes.dtype
    shape = ""
    try:
        if kernel.startswith("triton"):
            _require_triton(request)
        module, _, name = place.partition(":")
        trial: Callable[[TrialRequest], Iterator[TrialCase]] = getattr(importlib.import_module(module), name)
        for case in trial(request):
            shape = case.shape
            yield judge(kernel, case, request.device, measured)
    except NotAvailable as reason:
        yield TrialResult(kernel, shape, dtype, "not available", f"({reason})")
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        yield TrialResult(kernel, shape, dtype, "raised", f"{type(error).__name__}: {lines[0][:300]}")


def _require_triton(request: TrialRequest) -> None:
    if importlib.util.find_spec("triton") is None:
        raise NotAvailable("Triton is not installed")
    if request.dtype == torch.float64:
        raise NotAvailable("the kernels have no float64")
    if request.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise NotAvailable("Triton needs a GPU")


if __name__ == "__main__":
    main()
