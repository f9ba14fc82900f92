"""Messages between a process that wants trials and the child process that runs them."""

from __future__ import annotations

import msgspec

from worker.verdicts.records import Result
from worker.verdicts.shapes import Shapes

TRIALS: dict[str, str] = {
    "triton.norm": "worker.selftest.trials.modules:norm",
    "triton.gate": "worker.selftest.trials.modules:gate",
    "triton.rotary": "worker.selftest.trials.modules:rotary",
    "triton.store": "worker.selftest.trials.attention:store",
    "triton.decode": "worker.selftest.trials.attention:decode",
    "triton.prefill": "worker.selftest.trials.attention:prefill",
    "graphs": "worker.selftest.trials.capture:graphs",
    "cpp": "worker.selftest.trials.native:cpp",
    "collective.native": "worker.selftest.trials.collectives:native",
    "collective.interpreted": "worker.selftest.trials.collectives:interpreted",
    "collective.nccl": "worker.selftest.trials.collectives:nccl",
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
