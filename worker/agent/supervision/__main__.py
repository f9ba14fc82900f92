"""`python -m worker.agent.supervision`: this host's supervisor, and under it the agent. `furrow worker` runs it."""

from __future__ import annotations

import os
import sys

from control.process import die_with_parent, name_process, python_command, remembered_program
from worker.agent.supervision.supervisor import HostSupervisor, limits_from_environment


def main() -> int:
    if "FURROW_PARENT" in os.environ:
        die_with_parent()
    name_process("furrow-worker")
    try:
        limits = limits_from_environment()
    except ValueError as error:
        print(f"furrow worker: {error}", file=sys.stderr)
        return 1
    agent = python_command("worker", "agent")
    program = remembered_program()
    return HostSupervisor([*program, "worker", "--agent"] if program else agent, limits, agent).run()


if __name__ == "__main__":
    sys.exit(main())
