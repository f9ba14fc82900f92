"""Messages between a process that wants trials and the child process that runs them."""

from __future__ import annotations

import msgspec

from worker.selftest.records import Result
from worker.selftest.shapes import Shapes

TRIALS: dict[str, str] = {
    "triton.norm": "worker.models.torch.kernels.trials:norm",
    "triton.gate": "worker.models.torch.kernels.trials:gate",
    "triton.rotary": "worker.models.torch.kernels.trials:rotary",
    "triton.store": "worker.kv.torch.trials:store",
    "triton.decode": "worker.kv.torch.trials:decode",
    "triton.prefill": "worker.kv.torch.trials:prefill",
    "graphs": "worker.engine.torch.trials:graphs",
    "cpp": "worker.models.torch.layers.trials:cpp",
    "collective.native": "worker.collective.torch.trials:native",
    "collective.nccl": "worker.collective.torch.trials:nccl",
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
