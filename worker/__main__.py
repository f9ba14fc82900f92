"""Entry points of the processes that a host's supervisor starts, its agent, a rank and a standby, and of an agent's
downloads."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from control import logs
from control.errors import FurrowError, SettingsError
from control.settings import Settings, host_id, wait_for_url
from worker.agent.supervision.wire import take_channel


def run_agent() -> None:
    """The agent of this host, until its supervisor says stop; on SIGTERM it leaves its processes to the next agent."""
    gc.disable()  # imports leave no garbage, and collections visit all that they make
    from control.process import die_with_parent, name_process
    from worker.agent.standby import Standby
    from worker.agent.supervision.client import SupervisorClient
    from worker.rank.counters import FOLDER_VARIABLE, forget_folder, forget_unused, share_folder

    os.environ.pop(FOLDER_VARIABLE, None)  # only what this agent makes may be deleted
    agent: Agent | None = None

    def stop() -> None:
        if agent is None:  # nothing was started yet
            forget_unused(supervisor.records if FOLDER_VARIABLE in os.environ else {})  # else none is bound yet
            os._exit(0)
        agent.stop()

    try:
        supervisor = SupervisorClient(take_channel(), stop)
    except OSError:
        raise SettingsError("an agent runs under its host's supervisor: start that with `furrow worker`") from None
    die_with_parent()
    settings = Settings.from_environment()
    name_process("furrow-agent")
    logs.configure(settings.log_format, settings.log_level)
    counters = share_folder(supervisor.records)
    atexit.register(forget_unused, supervisor.records)
    standby = Standby(settings.redis_url, supervisor) if settings.standby else None
    if standby is not None and not supervisor.inherited:
        standby.tend(serving=False)  # beside the imports of this process

    from control.host_memory import capacity
    from control.messages import describe_structs
    from control.placement.membership import check_name
    from control.placement.placement import Host
    from control.redis.connection import connect
    from control.redis.servers import wait_until_ready
    from worker.agent.agent import Agent
    from worker.agent.devices import accelerators, device_memory
    from worker.agent.facts import FactsPublisher
    from worker.agent.metrics import HostMetrics
    from worker.external.host import engine_settings

    describe_structs()
    gc.freeze()
    gc.enable()
    wait_for_url(settings.redis_url, settings.redis_wait_s)
    client = connect(settings.redis_url)
    metrics = HostMetrics(supervisor, settings.metrics)
    if not supervisor.records:  # with ranks to look after it waits as a running agent does
        wait_until_ready(client, settings.redis_wait_s, say)
        check_name(client, host_id())
        supervisor.keep("devices", accelerators())
        # Before the first rank takes some of it: what is free now, other programs do not have.
        supervisor.keep("device_memory", {device: space.free for device, space in device_memory().items()})
    memory = None if settings.memory_bytes == 0 else capacity(settings.memory_bytes)
    host = Host(
        host_id(),
        tuple(supervisor.records["devices"]),
        memory=memory,
        dedicated=settings.memory_bytes is not None,
        device_memory=supervisor.records.get("device_memory", {}) if memory is not None else {},
        engines=tuple(engine_settings()),
    )
    agent = Agent(client, settings.redis_url, host, supervisor, standby)

    def leave(_signal: int, _frame: FrameType | None) -> None:
        agent.leaving = True

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the supervisor decides the order
    metrics.start(agent, connect(settings.redis_url))
    FactsPublisher(connect(settings.redis_url), host.id, supervisor.rank_versions).start()
    agent.run()
    if agent.stopping:
        forget_folder(counters)
    logging.shutdown()
    os._exit(0)  # a download that is under way must not delay it


def begin_rank() -> NoReturn:
    from worker.rank.early import compile_beside

    compile_beside()  # and beside the import of torch
    be_rank()


def be_rank() -> NoReturn:
    from worker.rank_process import run_rank

    status = run_rank()
    logging.shutdown()
    os._exit(status)  # torch takes seconds to free what the kernel frees at once


def run_standby(background: bool) -> None:
    """Fork ranks for the supervisor, until it closes the channel; a forked process is its rank."""
    from worker.standby_process import await_duty

    duty = await_duty(background)
    if duty is not None:
        os.environ.update(duty)
        be_rank()


def run_compile() -> None:
    """Compile what a rank will need, while the standby that is to fork it imports."""
    from control.process import die_with_parent
    from worker.rank.early import compile_now

    die_with_parent()
    settings = Settings.from_environment()
    logs.configure(settings.log_format, settings.log_level)
    compile_now()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    if part == "agent":
        try:
            run_agent()
        except FurrowError as error:
            say(f"furrow worker: {error}")
            return 1
    elif part == "rank":
        begin_rank()
    elif part == "standby":
        run_standby("background" in sys.argv[2:])
    elif part == "compile":
        run_compile()
    elif part == "need":
        from worker.agent.needs import print_need

        print_need()
    elif part == "engine":
        from worker.external.process import hold

        return hold(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    elif part == "download":
        from worker.repository.source import download_here

        return download_here(*sys.argv[2:6])
    else:
        say(f"unknown part {part!r}: a host's supervisor starts agent, rank and standby; run `furrow worker`")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
