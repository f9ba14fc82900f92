"""The end of a host's ranks without an agent: in order, each with the signal that was named at its start."""

from __future__ import annotations

import signal

from worker.agent.supervision.children import Children

KILL_AFTER_S = 75.0
"""Time for leaders to finish their step and give back their requests before all processes are killed."""


class HostShutdown:
    """Ends all children. `advance` is called again and again until none is left."""

    def __init__(self, children: Children, now: float) -> None:
        self._children, self._limit = children, now + KILL_AFTER_S
        self._told: set[int] = set()

    def advance(self, now: float) -> bool:
        """Signal whoever is next. True once no child lives."""
        living = self._children.living()
        if not living:
            return True
        late = now > self._limit
        first = min(child.ending.order for child in living)
        for child in living:
            pid = child.pid
            if late:
                self._children.signal(pid, signal.SIGKILL)
            elif child.ending.order == first and pid not in self._told:
                self._told.add(pid)
                self._children.signal(pid, child.ending.number)
        return False
