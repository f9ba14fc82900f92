"""`python -m worker.supervision`: this host's supervisor, and under it the agent. `furrow worker` runs it."""

from __future__ import annotations

import os
import sys

from control.process import die_with_parent, name_process
from worker.supervision.supervisor import HostSupervisor, Limits

ABSENT_VARIABLE = "FURROW_AGENT_ABSENT"
"""Seconds without an agent after which the host's ranks end."""


def limits_from_environment() -> Limits:
    """Raises ValueError for a number that is none, or not positive."""
    text = os.environ.get(ABSENT_VARIABLE) or str(Limits.absent_s)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{ABSENT_VARIABLE}={text!r} is not a positive number of seconds")
    return Limits(absent_s=seconds)


def main() -> int:
    """Run the supervisor to its end; the exit status."""
    if "FURROW_PARENT" in os.environ:
        die_with_parent()
    name_process("furrow-worker")
    try:
        limits = limits_from_environment()
    except ValueError as error:
        print(f"furrow worker: {error}", file=sys.stderr)
        return 1
    return HostSupervisor([sys.executable, "-m", "worker", "agent"], limits).run()


if __name__ == "__main__":
    sys.exit(main())
