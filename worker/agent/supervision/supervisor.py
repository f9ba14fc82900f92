"""A host's supervisor: starts the agent again when it dies, while the ranks and the standby go on.

It does nothing that may fail or take long: it starts processes for the agent, reaps them, stores exit statuses, and
relays lines between the agent and the standby, whose forks become its own children. It knows neither Redis nor models,
and imports only the standard library. A new agent is started only after the old one was reaped.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from types import FrameType
from typing import Any

from control.backoff import doubling, pause_after
from control.process import adopt_orphans
from worker.agent.supervision.children import Children, Forks, HostShutdown
from worker.agent.supervision.wire import AgentLink, Ending
from worker.detectors import AGENT_ABSENT_S, AGENT_SILENT_S
from worker.rank.exit_codes import describe

# The times of a host's supervisor. An operator or a test may set those of `SupervisorLimits`.


PAUSES_S = (0.0, *doubling(0.5, 8.0))
"""Pauses before the n-th start in a row of an agent that ended soon."""
FAILURES = 3
"""Agents in a row that ended soon, after which the supervisor's own build is started."""
STEADY_S = 5.0
"""An agent that lived for this time is started again without a pause."""
REPLACE_S = 10.0
"""Time for an agent to exit by itself when it is replaced."""
GAP_S = 5.0
"""If the supervisor itself did not run for this time, silence is no evidence."""
ABSENT_VARIABLE = "FURROW_AGENT_ABSENT"
"""Environment variable: seconds without an agent after which the host's ranks end."""


@dataclass
class SupervisorLimits:
    """In seconds."""

    absent_s: float = AGENT_ABSENT_S
    """Time without a working agent after which the host's ranks end."""
    stop_s: float = 85.0
    """Time for all processes to end after SIGTERM before they are killed."""


def limits_from_environment() -> SupervisorLimits:
    """Raises ValueError for a number that is none, or not positive."""
    text = os.environ.get(ABSENT_VARIABLE) or str(SupervisorLimits.absent_s)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{ABSENT_VARIABLE}={text!r} is not a positive number of seconds")
    return SupervisorLimits(absent_s=seconds)


# Log lines of the supervisor, in the format of the other processes, without their libraries.


_LEVELS = ("debug", "info", "warning", "error", "critical")


def log(level: str, event: str, **fields: object) -> None:
    """Write one line to standard error, as FURROW_LOG_FORMAT and FURROW_LOG_LEVEL ask."""
    lowest = (os.environ.get("FURROW_LOG_LEVEL") or "info").lower()
    if lowest in _LEVELS and _LEVELS.index(level) < _LEVELS.index(lowest):
        return
    style = os.environ.get("FURROW_LOG_FORMAT") or "auto"
    at = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")  # noqa: UP017
    if style == "json" or (style == "auto" and not sys.stderr.isatty()):
        line = json.dumps({**fields, "event": event, "level": level, "timestamp": at}, default=str)
    else:
        line = f"{at} [{level:<8}] {event:<30} " + " ".join(f"{name}={value}" for name, value in fields.items())
    with suppress(OSError):  # a reader of the logs that has gone must not end the host's processes
        os.write(2, line.encode() + b"\n")


TICK_S = 0.25


def signal_agent(agent: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to an agent that has not been reaped. Popen's own methods would reap one that has just ended, and
    the supervisor would wait for its end for ever."""
    with suppress(ProcessLookupError):
        os.kill(agent.pid, number)


class HostSupervisor:
    """Runs `command` as the agent. Where that can't be run, or has failed FAILURES times in a row, it runs
    `own_command`, the agent of this build: a new build that does not start must not end the ranks. The first agent is
    `own_command` too, which starts sooner. Use from the main thread: children die with the thread that forked them."""

    def __init__(
        self, command: list[str], limits: SupervisorLimits | None = None, own_command: list[str] | None = None
    ) -> None:
        self._command = command
        self._own_command = own_command if own_command is not None else command
        self._next = self._own_command
        self._limits = limits or SupervisorLimits()
        self._children = Children()
        self._forks = Forks(self._children, self._send)
        self._records: dict[str, Any] = {}
        self._selector = selectors.DefaultSelector()
        self._agent: subprocess.Popen[bytes] | None = None
        self._link: AgentLink | None = None
        self._started = self._last_message_at = self._last = time.monotonic()
        self._spoken = self._ever_spoken = False
        self._failures = 0
        self._due = 0.0
        self._leave_by: float | None = None
        self._shutdown: HostShutdown | None = None
        self._stop_by: float | None = None
        self._replace = self._stop = False

    def run(self) -> int:
        """Run until stopped and all processes have ended, or until the first agent could not start; the exit status."""
        adopt_orphans()  # a process that a standby forks becomes a child of this one
        woken = self._listen_to_signals()
        while True:
            now = time.monotonic()
            if now - self._last > GAP_S:
                self._last_message_at = now
            self._last = now
            failed = self._reap(now)
            if failed is not None:
                return failed
            if self._turn(now):
                return 0
            self._wait(woken)

    # --- signals ----------------------------------------------------------------------------------------------------

    def _listen_to_signals(self) -> socket.socket:
        """SIGTERM, SIGINT and SIGHUP stop; SIGUSR2 replaces the agent."""
        woken, wake = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        signal.set_wakeup_fd(wake.detach(), warn_on_full_buffer=False)

        def stop(_number: int, _frame: FrameType | None) -> None:
            self._stop = True

        def replace(_number: int, _frame: FrameType | None) -> None:
            self._replace = True

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, stop)
        signal.signal(signal.SIGUSR2, replace)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        # Children inherit it: a leader that is only starting must not die of being told to drain.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self._selector.register(woken, selectors.EVENT_READ)
        return woken

    # --- one turn ---------------------------------------------------------------------------------------------------

    def _turn(self, now: float) -> bool:
        """Act on what is due. True once everything has ended after a stop."""
        if self._stop and self._stop_by is None:
            self._stop_by = now + self._limits.stop_s
            log("info", "stopping the host", action="supervisor_stop")
            self._send({"event": "stop"})
        if self._stop_by is not None:
            return self._leave(now, self._stop_by)
        self._judge_agent(now)
        self._forks.expire(now)
        if self._children.living() and now - self._last_message_at > self._limits.absent_s and self._shutdown is None:
            log("error", "no agent: the ranks end", absent_s=self._limits.absent_s, action="ranks_end")
            self._shutdown = HostShutdown(self._children, now)
            if self._agent is not None and not self._spoken:
                signal_agent(self._agent, signal.SIGKILL)
        if self._shutdown is not None and self._shutdown.advance(now):
            self._shutdown = None
        if self._agent is None and now >= self._due:
            self.start_agent()
        return False

    def _leave(self, now: float, stop_by: float) -> bool:
        """Wait for the agent to end the ranks; end those that are left without it."""
        if now > stop_by:
            if self._agent is not None:
                signal_agent(self._agent, signal.SIGKILL)
            for child in self._children.living():
                self._children.signal(child.pid, signal.SIGKILL)
        if self._agent is not None:
            return False
        self._shutdown = self._shutdown or HostShutdown(self._children, now)
        return self._shutdown.advance(now)

    def _judge_agent(self, now: float) -> None:
        """Replace the agent if that was requested, or if it hangs."""
        agent = self._agent
        if self._replace:
            self._replace = False
            if agent is not None and self._leave_by is None:
                log("info", "replacing the agent", pid=agent.pid, action="agent_replace")
                signal_agent(agent, signal.SIGTERM)
                self._leave_by = now + REPLACE_S
        if agent is None:
            return
        if self._leave_by is not None and now > self._leave_by:
            signal_agent(agent, signal.SIGKILL)
        if self._spoken and now - self._last_message_at > AGENT_SILENT_S:
            log("error", "the agent hangs and is killed", pid=agent.pid, silent_s=AGENT_SILENT_S, action="agent_kill")
            signal_agent(agent, signal.SIGKILL)
            self._spoken = False

    def _wait(self, woken: socket.socket) -> None:
        """Handle what arrives until the next tick at the latest."""
        channels = self._children.channels()
        forks = self._forks.sockets
        for channel in (*channels, *forks):
            self._selector.register(channel, selectors.EVENT_READ)
        if self._link is not None and self._link.open:
            self._selector.register(self._link.socket, self._link.interest)
        try:
            ready = self._selector.select(TICK_S)
        finally:
            for key in list(self._selector.get_map().values()):
                if key.fileobj is not woken:
                    self._selector.unregister(key.fileobj)
        for key, mask in ready:
            if key.fileobj is woken:
                with suppress(BlockingIOError):
                    woken.recv(4096)
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in channels:
                self._relay(channels[key.fileobj])
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in forks:
                self._forks.hear(key.fileobj)
            elif self._link is not None:
                self._serve(self._link, mask)

    # --- the agent --------------------------------------------------------------------------------------------------

    def start_agent(self) -> None:
        """Start the agent with one end of a new socket pair as its standard input."""
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "FURROW_PARENT": str(os.getpid())}
        command = self._next if self._failures < FAILURES else self._own_command
        self._next = self._command
        if self._failures >= FAILURES and command is not self._command:
            words = {"command": " ".join(self._command), "failures": self._failures, "instead": " ".join(command)}
            log("error", "this build's own agent is started", **words, action="agent_own")
        try:
            with theirs:
                self._agent = subprocess.Popen(command, env=environment, stdin=theirs.fileno())
        except OSError as error:
            ours.close()
            pause = self._pause(time.monotonic())
            log("error", "the agent can't be started", error=str(error), again_in_s=pause, action="agent_start")
            return
        log("info", "agent started", pid=self._agent.pid, command=" ".join(command), action="agent_start")
        self.attach(ours)

    def attach(self, link: socket.socket) -> None:
        """Serve the agent at the other end: tell it first what there is."""
        self._link, self._spoken, self._started = AgentLink(link), False, time.monotonic()
        self._link.send({"event": "welcome", "children": self._children.describe(), "kept": self._records})

    def _serve(self, link: AgentLink, mask: int) -> None:
        """Read the agent's requests, and send it the messages that it has not taken yet."""
        if mask & selectors.EVENT_WRITE:
            link.flush()
        if mask & selectors.EVENT_READ:
            for line in link.receive():
                self._hear(link, line)

    def _hear(self, link: AgentLink, line: bytes) -> None:
        """Obey a request. One that can't be understood, as a newer agent may send, harms nobody."""
        number = None
        try:
            request = json.loads(line)
            number = request.get("id")
            self._obey(link, request)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            log("error", "a request of the agent is not understood", error=repr(error), action="supervisor_request")
            if number is not None:
                link.send({"event": "answer", "id": number, "error": f"not understood: {error!r}"})

    def _obey(self, link: AgentLink, request: dict[str, Any]) -> None:
        self._last_message_at, op = time.monotonic(), request["op"]
        if request.get("tag", {}).get("kind") != "standby":  # that is asked for before the agent waits for Redis
            self._spoken = self._ever_spoken = True
        if self._stop_by is None:
            self._shutdown = None  # an agent is there: it decides
        if op in ("spawn", "tell", "fork"):
            try:
                if (pid := self._start(op, request)) is not None:
                    link.send({"event": "answer", "id": request["id"], "pid": pid})
            except OSError as error:
                link.send({"event": "answer", "id": request["id"], "error": str(error)})
        elif op == "signal":
            self._children.signal(request["pid"], request["number"])
        elif op == "forget":
            self._children.forget(request["pid"])
        elif op == "keep":
            self._records[request["key"]] = request["value"]
            if request["value"] is None:
                del self._records[request["key"]]
        elif op != "alive":
            raise LookupError(f"unknown op {op!r}")

    def _start(self, op: str, request: dict[str, Any]) -> int | None:
        """Start or tell a process; its pid, or None where the answer comes later. Raises OSError."""
        if op == "spawn":
            tag = request["tag"]
            ending = Ending(*request["ending"])
            return self._children.spawn(request["argv"], request["env"], tag, ending, request["channel"])
        if op == "tell":
            self._children.tell(request["pid"], request["line"])
            return request["pid"]
        self._forks.begin(request)
        return None

    def _relay(self, pid: int) -> None:
        for line in self._children.hear(pid):
            self._send({"event": "said", "pid": pid, "line": line})

    def _send(self, message: dict[str, Any]) -> None:
        """To the agent, if there is one."""
        if self._link is not None:
            self._link.send(message)

    # --- exits ------------------------------------------------------------------------------------------------------

    def _reap(self, now: float) -> int | None:
        """Reap every process that has ended; the exit status if the very first agent could not start."""
        failed = None
        while True:
            try:
                pid, code = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return failed
            if pid == 0:
                return failed
            status = os.waitstatus_to_exitcode(code)
            if self._agent is not None and pid == self._agent.pid:
                failed = self._agent_ended(self._agent, status, now)
            elif self._children.ended(pid, status):
                self._send({"event": "exit", "pid": pid, "status": status})
            else:
                self._forks.reaped(pid, status)

    def _agent_ended(self, agent: subprocess.Popen[bytes], status: int, now: float) -> int | None:
        agent.returncode = status
        if self._link is not None:
            for line in self._link.receive():  # what it asked for just before it died is done
                self._hear(self._link, line)
            self._link.close()
        self._agent = self._link = self._leave_by = None
        self._forks.abort()
        if self._stop_by is not None or self._stop:
            return None
        if not self._ever_spoken and status != 0:
            return status if status > 0 else 128 - status
        pause = self._pause(now)
        ranks = len(self._children.living())
        words = {"pid": agent.pid, "status": describe(status), "processes_kept": ranks, "again_in_s": pause}
        log("info" if status == 0 else "error", "the agent ended and is started again", **words, action="agent_restart")
        return None

    def _pause(self, now: float) -> float:
        """Plan the next start; the seconds until then."""
        self._failures = 0 if now - self._started > STEADY_S else self._failures
        self._failures += 1
        pause = pause_after(self._failures, PAUSES_S)
        self._due = now + pause
        return pause
