"""The agent's end of the socket to its host's supervisor: child processes that look like those of `subprocess`."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from worker.agent.supervision.wire import CHUNK_BYTES, Ending, LineBuffer, Tag, encode_line


class ChildProcess:
    """One child of the supervisor, with the interface of `subprocess.Popen` as far as it is used."""

    def __init__(self, client: SupervisorClient, pid: int, tag: Tag) -> None:
        self._client = client
        self.pid = pid
        self.tag = tag
        self.started = 0.0
        """Seconds since 1970; 0 for a process that this agent asked for."""
        self.said: list[str] = []
        """The lines that it wrote to its channel."""
        self._status: Future[int] = Future()

    @property
    def returncode(self) -> int | None:
        return self._status.result() if self._status.done() else None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended. Raises TimeoutError."""
        return self._status.result(timeout)

    def when_ended(self, call: Callable[[int], None]) -> None:
        """Call with the exit status when it has ended, from another thread; at once if it has."""
        self._status.add_done_callback(lambda status: call(status.result()))

    def send_signal(self, number: int) -> None:
        """Does nothing to a process that has ended."""
        self._client.send({"op": "signal", "pid": self.pid, "number": int(number)})

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def tell(self, line: str) -> None:
        """Send a line to its channel. Raises OSError if it has ended."""
        self._client.ask({"op": "tell", "pid": self.pid, "line": line}).result()

    def fork(self, line: str, tag: Tag, ending: Ending) -> ChildProcess:
        """Have it fork; the new process, to which the line is sent. Raises OSError if it did not."""
        words = {"pid": self.pid, "line": line, "tag": tag, "ending": list(ending)}
        return self._client.ask({"op": "fork", **words}, tag).result()

    def forget(self) -> None:
        """Let the supervisor forget the exit, which has been handled."""
        self._client.forget(self.pid)

    def ended(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)


class SupervisorClient:
    """The children and the state that the supervisor holds. Thread-safe; a thread of its own reads."""

    def __init__(self, link: socket.socket, on_stop: Callable[[], None] = lambda: None) -> None:
        """Reads the welcome first. Raises OSError where nothing is at the other end."""
        self._link = link
        self._on_stop = on_stop
        self.on_said: Callable[[], None] = lambda: None
        """Called when a child wrote a line to its channel, or a channel's child ended; from another thread."""
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Future[ChildProcess], Tag]] = {}
        self._processes: dict[int, ChildProcess] = {}
        self._lines = LineBuffer()
        first, *rest = self._receive()
        self.records: dict[str, Any] = first["kept"]
        """The state that earlier agents stored, by key."""
        self.inherited = [self._inherit(child) for child in first["children"]]
        """The children that were there before this agent, ended ones included."""
        for message in rest:
            self._handle(message)
        threading.Thread(target=self._read, name="supervisor", daemon=True).start()

    def spawn(
        self, argv: list[str], env: dict[str, str], tag: Tag, ending: Ending, channel: bool = False
    ) -> ChildProcess:
        """Start a process; with a `channel` its standard input is a socket to the supervisor. Raises OSError."""
        words = {"argv": argv, "env": env, "tag": tag, "ending": list(ending), "channel": channel}
        return self.ask({"op": "spawn", **words}, tag).result()

    def keep(self, key: str, value: Any) -> None:
        """Store state for the next agent; None removes it."""
        if self.records.get(key) != value:
            self.records[key] = value
            self.send({"op": "keep", "key": key, "value": value})

    def forget(self, pid: int) -> None:
        """The exit of this process was acted on: the next agent need not know of it."""
        self.send({"op": "forget", "pid": pid})

    def rank_versions(self) -> dict[str, str]:
        """The build of each rank that runs, by `model:replica rank N`."""
        tags = [process.tag for process in list(self._processes.values()) if process.tag.get("kind") == "rank"]
        return {f"{tag['model']}:{tag['replica']} rank {tag['rank']}": str(tag.get("version")) for tag in tags}

    def alive(self) -> None:
        self.send({"op": "alive"})

    def ask(self, request: dict[str, Any], tag: Tag | None = None) -> Future[ChildProcess]:
        number = next(self._numbers)
        answer = Future[ChildProcess]()
        self._waiting[number] = answer, tag or {}
        self.send({**request, "id": number})
        return answer

    def send(self, message: dict[str, Any]) -> None:
        """A supervisor that has gone takes this process with it, so nothing is raised for that."""
        with self._sending, suppress(OSError):
            self._link.sendall(encode_line(message))

    def close(self) -> None:
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()

    def _inherit(self, child: dict[str, Any]) -> ChildProcess:
        process = ChildProcess(self, child["pid"], child["tag"])
        process.started, process.said = child["started"], child["said"]
        if child["status"] is not None:
            process.ended(child["status"])
        else:
            self._processes[process.pid] = process
        return process

    def _read(self) -> None:
        while True:
            try:
                messages = self._receive()
            except OSError as error:
                for answer, _ in list(self._waiting.values()):
                    answer.set_exception(error)
                return
            for message in messages:
                self._handle(message)

    def _receive(self) -> list[dict[str, Any]]:
        """The next messages, at least one. Raises OSError at the end."""
        while True:
            data = self._link.recv(CHUNK_BYTES)
            if not data:
                raise ConnectionResetError("the host's supervisor has gone")
            if lines := self._lines.feed(data):
                return [json.loads(line) for line in lines]

    def _handle(self, message: dict[str, Any]) -> None:
        match message["event"]:
            case "answer":
                answer, tag = self._waiting.pop(message["id"])
                if "error" in message:
                    answer.set_exception(OSError(message["error"]))
                    return
                # Before the answer is heard, so that an exit which follows it finds the process.
                process = self._processes.setdefault(message["pid"], ChildProcess(self, message["pid"], tag))
                answer.set_result(process)
            case "exit":
                process = self._processes.pop(message["pid"])
                process.ended(message["status"])
                self.on_said()
            case "said":
                self._processes[message["pid"]].said.append(message["line"])
                self.on_said()
            case "stop":
                self._on_stop()
            case _:  # of a newer supervisor
                pass
