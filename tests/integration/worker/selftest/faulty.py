"""Trials of kernels that are wrong on purpose; child processes import this module."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from worker.collective.shared_memory import NativeExchange
from worker.collective.torch import trials as collectives
from worker.engine.torch import trials as capture
from worker.kv.torch import paged_kernels
from worker.kv.torch import trials as attention
from worker.models.torch.kernels import trials as modules
from worker.selftest.trial import TrialCase, TrialRequest


def wrong_scale(request: TrialRequest) -> Iterator[TrialCase]:
    """The decode kernel with scores that are a tenth too large."""
    right = paged_kernels.arguments

    def wrong(*given: Any) -> dict[str, Any]:
        arguments = right(*given)
        return arguments | {"scale": arguments["scale"] * 1.1}

    with mock.patch.object(paged_kernels, "arguments", wrong):
        yield from attention.decode(request)


def wrong_place(request: TrialRequest) -> Iterator[TrialCase]:
    """A store that leaves the new tokens out."""
    with mock.patch.object(paged_kernels, "store", lambda *given: None):
        yield from attention.store(request)


def raising(request: TrialRequest) -> Iterator[TrialCase]:
    raise RuntimeError("out of resources: shared memory\nin a kernel")
    yield from modules.gate(request)


def killed(request: TrialRequest) -> Iterator[TrialCase]:
    """As an illegal access that ends the process."""
    yield from modules.norm(request)
    os.kill(os.getpid(), signal.SIGSEGV)


def refused_capture(request: TrialRequest) -> Iterator[TrialCase]:
    def refuse(work: Callable[[], None]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    yield from capture.captured(request, refuse)


def stale_capture(request: TrialRequest) -> Iterator[TrialCase]:
    """A graph that replays what it captured, and not what its buffers hold."""

    class Stale:
        def replay(self) -> None: ...

    yield from capture.captured(request, lambda work: Stale())


def hanging_collective(request: TrialRequest) -> Iterator[TrialCase]:
    def hang(*_: torch.Tensor) -> None:
        time.sleep(600)

    with mock.patch.object(NativeExchange, "all_reduce", hang):
        yield from collectives.native(request)
