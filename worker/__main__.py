"""Entry points: `python -m worker agent` runs a host's agent, `rank` one rank of it, `standby` a rank to be."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from control import logs
from control.errors import FurrowError
from control.settings import Settings


def run_agent() -> None:
    """The agent of this host, until SIGTERM or SIGINT."""
    from control.connection import connect
    from control.placement import Host
    from control.process import die_with_parent
    from control.readiness import wait_until_ready
    from worker.agent import Agent
    from worker.devices import accelerators
    from worker.replica import host_id
    from worker.standby import Standby

    settings = Settings.from_environment()
    if settings.has_parent:
        die_with_parent()
    logs.configure(settings.log_format, settings.log_level)
    client = connect(settings.redis_url)
    wait_until_ready(client, settings.redis_wait_s, say)
    standby = Standby(settings.redis_url) if settings.standby else None
    agent = Agent(client, settings.redis_url, Host(host_id(), accelerators()), standby)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        agent.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    # Children inherit it: a leader that is only starting must not die of being told to drain.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    agent.run()


def be_rank() -> NoReturn:
    """The rank that the environment describes, to its end."""
    from worker.process import run_rank

    status = run_rank()
    logging.shutdown()
    os._exit(status)  # torch takes seconds to free what the kernel frees at once


def run_standby(descriptor: int, folders: list[Path]) -> None:
    """Wait behind the agent's socket until a rank is needed, and be it."""
    from worker.standby_process import await_duty

    duty = await_duty(socket.socket(fileno=descriptor), folders)
    if duty is not None:
        os.environ.update(duty)
        be_rank()


def say(line: str) -> None:
    """Tell whoever started the process."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Run the part named by the first argument."""
    part = sys.argv[1] if len(sys.argv) > 1 else "agent"
    if part == "agent":
        try:
            run_agent()
        except FurrowError as error:
            say(f"furrow worker: {error}")
            return 1
    elif part == "rank":
        be_rank()
    elif part == "standby":
        run_standby(int(sys.argv[2]), [Path(folder) for folder in sys.argv[3:]])
    else:
        say(f"unknown part {part!r}: python -m worker agent|rank|standby")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
