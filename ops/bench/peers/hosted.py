"""A loop in a process of its own, under the interpreter that has its packages: `python -m ops.bench.peers.hosted LOOP
SETUP`, one JSON line per answer. Standard library only: the interpreters of other engines import it.

The process says {"ready": true} once the model is loaded, then answers each {"prompts", "tokens"} with {"streams"}; or
{"unavailable": why} and {"failed": why}, after which it ends. Output of libraries goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from ops.bench.peers.engine import Failed, Setup, Stream, Unavailable

LIMIT_S = 7200.0
"""For one answer: the slowest engine's longest run, so that only a hang reaches it."""
STOP_LIMIT_S = 20.0
LINES = 3
"""Of a child's output, that are named with its unexpected end."""
_ROOT = Path(__file__).resolve().parents[3]


class Child:
    """The process of an engine, in a session of its own. Its output is kept to explain an unexpected end; `piped`: its
    standard input and output are pipes, and it ends with its input."""

    def __init__(
        self, command: list[str], env: dict[str, str], *, piped: bool = False, folder: Path | None = None
    ) -> None:
        """Raises Unavailable."""
        self._log = tempfile.TemporaryFile(prefix="furrow-bench-")  # noqa: SIM115  # it lives as long as the child
        pipe = subprocess.PIPE if piped else None
        try:
            self.process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe or self._log,
                stderr=self._log,
                cwd=folder,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise Unavailable(f"{command[0]} can't be started: {error.strerror or error}") from error

    def last_words(self) -> str:
        """The last lines of its output, in one."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " / ".join(lines[-LINES:]) or "it said nothing"

    def stop(self) -> None:
        """End it; its children end with it."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended already
                self.process.stdin.close()
        else:
            self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):  # it is killed below
            self.process.wait(STOP_LIMIT_S)
        self._signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        """To the process and all of its session."""
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self.process.pid, number)


class Hosted:
    """Drives `ops.bench.peers.loops.<loop>` under `python`."""

    def __init__(
        self, loop: str, setup: Setup, python: str = sys.executable, env: dict[str, str] | None = None
    ) -> None:
        self._command = [python, "-m", "ops.bench.peers.hosted", loop, json.dumps(setup.as_json())]
        self._env = env or dict(os.environ)
        self._child: Child | None = None

    def start(self) -> float:
        """As Engine's."""
        began = time.monotonic()
        self._child = Child(self._command, self._env, piped=True, folder=_ROOT)
        self._answer()
        return began

    def run(self, prompts: list[list[int]], tokens: int) -> list[Stream]:
        """As Engine's."""
        assert self._child is not None and self._child.process.stdin is not None
        try:
            self._child.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}).encode() + b"\n")
            self._child.process.stdin.flush()
        except BrokenPipeError as error:
            raise Failed(f"its process is gone: {self._child.last_words()}") from error
        return [Stream(**stream) for stream in self._answer()["streams"]]

    def stop(self) -> None:
        """As Engine's."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def _answer(self) -> dict[str, Any]:
        """The next line. Raises Unavailable or Failed."""
        assert self._child is not None and self._child.process.stdout is not None
        output = self._child.process.stdout
        until = time.monotonic() + LIMIT_S
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(until - time.monotonic()):
                    raise Failed(f"it said nothing for {LIMIT_S:.0f} s")
                data = os.read(output.fileno(), 2**20)
                if not data:
                    status = self._child.process.wait()
                    raise Failed(f"its process ended with status {status}: {self._child.last_words()}")
                line += data
        answer = json.loads(line)
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer


def bare_loop(setup: Setup) -> Hosted:
    """Furrow's loop without a farm, in the environment that agents give to ranks."""
    return Hosted("furrow_loop", setup, env={"OMP_WAIT_POLICY": "passive", **os.environ})


def serve(loop_name: str, setup: str) -> int:
    """Answer requests from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        loop = importlib.import_module(f"ops.bench.peers.loops.{loop_name}").load(Setup.of_json(json.loads(setup)))
        _say(answers, ready=True)
        for line in sys.stdin:
            request: dict[str, Any] = json.loads(line)
            streams = loop.run(request["prompts"], request["tokens"])
            _say(answers, streams=[asdict(stream) for stream in streams])
    except (Unavailable, ImportError) as error:
        _say(answers, unavailable=str(error))
        return 1
    except Exception as error:
        traceback.print_exc()
        _say(answers, failed=f"{type(error).__name__}: {error}")
        return 1
    return 0


def _say(answers: TextIO, **answer: Any) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    # At once: threads that a library left must not keep the process.
    os._exit(serve(*sys.argv[1:]))
