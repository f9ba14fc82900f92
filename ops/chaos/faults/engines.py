"""The process of an external engine: killed, or stopped so that only its leader's deadline finds it."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

from ops.chaos.errors import NoEffect
from ops.chaos.faults import network, processes, servers
from ops.chaos.faults.fault import Fault
from ops.chaos.faults.processes import proved
from ops.chaos.system.target import Target


def strike_engine(number: signal.Signals) -> Callable[[Target, random.Random], str]:
    """Send a signal to the engine; the proof is another process in a later epoch."""

    def strike(target: Target, random: random.Random) -> str:
        pid = target.until(lambda: target.engine_pid, "the engine has a process", processes.EFFECT_WITHIN_S)
        epoch = target.epoch()
        target.send(pid, number)

        def newcomer() -> int | None:
            now = target.engine_pid
            return now if now not in (None, pid) and target.epoch() > epoch else None

        try:
            after = proved(target, newcomer, f"the engine is not pid {pid}, in a later epoch than {epoch}")
        except NoEffect:
            target.send(pid, signal.SIGCONT)  # the hang was not detected: let the other strikes go on
            raise
        return f"pid {pid} -> {after}"

    return strike


FAULTS: dict[str, Fault] = {
    "engine-kill": strike_engine(signal.SIGKILL),
    "engine-stop": strike_engine(signal.SIGSTOP),
}
KINDS = (
    *FAULTS,
    "leader-kill",
    "leader-stop",
    "agent-kill",
    "agent-and-rank-kill",
    "api-kill",
    *servers.FAULTS,
    *network.FAULTS,
)
"""Those that make sense for a model on an external engine."""
