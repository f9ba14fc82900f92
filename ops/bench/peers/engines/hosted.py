"""A loop in a process of its own, seen from the one that measures."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ops.bench.peers.base import Failed, Setup, Stream, Unavailable
from ops.bench.peers.engines.child_log import ChildLog

LIMIT_S = 7200.0
"""For one answer: the slowest engine's longest run, so that only a hang reaches it."""
STOP_LIMIT_S = 20.0
_ROOT = Path(__file__).resolve().parents[4]


class Hosted:
    """Drives `ops.bench.peers.loops.<loop>` under `python`."""

    def __init__(
        self,
        loop: str,
        setup: Setup,
        python: str = sys.executable,
        env: dict[str, str] | None = None,
        at_once: bool = True,
    ) -> None:
        self._loop, self._setup, self._python, self._env = loop, setup, python, env or dict(os.environ)
        self.at_once = at_once
        self._process: subprocess.Popen[bytes] | None = None
        self._log: ChildLog | None = None

    def start(self) -> float:
        """As Engine's."""
        self._log = ChildLog()
        command = [self._python, "-m", "ops.bench.peers.engines.child", self._loop, json.dumps(self._setup.as_json())]
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
        until, line = time.monotonic() + LIMIT_S, b""
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
