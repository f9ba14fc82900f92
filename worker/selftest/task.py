"""Messages between a process that wants trials and the child process that runs them."""

from __future__ import annotations

import msgspec

from worker.selftest.records import Result
from worker.selftest.shapes import Shapes

TRIALS: dict[str, str] = {
    "triton.norm": "worker.models.kernels.trials:norm",
    "triton.gate": "worker.models.kernels.trials:gate",
    "triton.rotary": "worker.models.kernels.trials:rotary",
    "triton.store": "worker.kv.trials:store",
    "triton.decode": "worker.kv.trials:decode",
    "triton.prefill": "worker.kv.trials:prefill",
    "graphs": "worker.engine.trials:graphs",
    "cpp": "worker.models.layers.trials:cpp",
    "collective.native": "worker.collective.trials:native",
    "collective.nccl": "worker.collective.trials:nccl",
}
"""Name of a kernel → module and function of its trial."""


class Task(msgspec.Struct, frozen=True):
    """Trials for one device; `pipe` is the descriptor that gets a line of JSON for each `Message`."""

    device: str
    shapes: Shapes
    tokens: int
    measured: bool
    trials: dict[str, str]
    pipe: int = -1


class Begun(msgspec.Struct, tag="begun"):
    kernel: str


class Tried(msgspec.Struct, tag="tried"):
    result: Result


class Done(msgspec.Struct, tag="done"):
    kernel: str


Message = Begun | Tried | Done
