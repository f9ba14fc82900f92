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
"""Of a child's output, told with its unexpected end."""
_ROOT = Path(__file__).resolve().parents[3]


class ChildLog:
    """The output of a child process, kept to explain an unexpected end: a file without a name, until `close`."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(prefix="furrow-bench-")  # noqa: SIM115  # it lives as long as the child

    def close(self) -> None:
        self.file.close()

    def last_words(self) -> str:
        """The last lines, in one."""
        self.file.seek(0)
        lines = self.file.read().decode(errors="replace").strip().splitlines()
        return " / ".join(lines[-LINES:]) or "it said nothing"


class Hosted:
    """Drives `ops.bench.peers.loops.<loop>` under `python`."""

    def __init__(
        self, loop: str, setup: Setup, python: str = sys.executable, env: dict[str, str] | None = None
    ) -> None:
        self._loop, self._setup, self._python, self._env = loop, setup, python, env or dict(os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: ChildLog | None = None

    def start(self) -> float:
        """As Engine's."""
        self._log = ChildLog()
        command = [self._python, "-m", "ops.bench.peers.hosted", self._loop, json.dumps(self._setup.as_json())]
        began = time.monotonic()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log.file, cwd=_ROOT, env=self._env
            )
        except OSError as error:
            raise Unavailable(f"{self._python} can't be started: {error.strerror or error}") from error
        self._answer()
        return began

    def run(self, prompts: list[list[int]], tokens: int) -> list[Stream]:
        """As Engine's."""
        assert self._process is not None and self._process.stdin is not None and self._log is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise Failed(f"its process is gone: {self._log.last_words()}") from error
        return [Stream(**stream) for stream in self._answer()["streams"]]

    def stop(self) -> None:
        """As Engine's."""
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            with suppress(BrokenPipeError):  # it has ended already
                self._process.stdin.close()
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _answer(self) -> dict[str, Any]:
        """The next line. Raises Unavailable or Failed."""
        assert self._process is not None and self._process.stdout is not None and self._log is not None
        until = time.monotonic() + LIMIT_S
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(until - time.monotonic()):
                    raise Failed(f"it said nothing for {LIMIT_S:.0f} s")
                data = os.read(self._process.stdout.fileno(), 2**20)
                if not data:
                    raise Failed(f"its process ended with status {self._process.wait()}: {self._log.last_words()}")
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
