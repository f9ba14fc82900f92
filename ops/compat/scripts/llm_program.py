"""Checks of Simon Willison's `llm`, however it is told of the server."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from checks import LONG, check, undisturbed

Prepare = Callable[[Path], dict[str, str]]
"""Writes what `llm` wants into its folder, and returns more of its environment."""


class Program:
    """`llm` with a model; `limit_option` is its name for the most tokens of an answer."""

    def __init__(self, prepare: Prepare, model: str, limit_option: str) -> None:
        self._prepare = prepare
        self._model = model
        self._limit_option = limit_option

    def command(self, folder: str, *words: str, limit: int = 24) -> tuple[list[str], dict[str, str]]:
        """The command for a prompt and its environment."""
        environment = {**os.environ, "LLM_USER_PATH": folder, "PYTHONUNBUFFERED": "1", **self._prepare(Path(folder))}
        options = ["-o", self._limit_option, str(limit), "-o", "temperature", "0"]
        return [sys.executable, "-m", "llm", "-m", self._model, *options, *words], environment

    def run(self, command: list[str], environment: dict[str, str]) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=environment, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stderr[-280:]
        return done.stdout.strip()

    def ask(self, folder: str, *words: str, limit: int = 24) -> str:
        return self.run(*self.command(folder, *words, limit=limit))

    def add_checks(self) -> None:
        """Those of every way to the server."""

        @check("an answer, streamed and whole")
        def answer() -> None:
            with tempfile.TemporaryDirectory() as folder:
                streamed = self.ask(folder, "What is a poisoned replica?")
                assert streamed == self.ask(folder, "--no-stream", "What is a poisoned replica?") and streamed

        @check("a second turn")
        def conversation() -> None:
            with tempfile.TemporaryDirectory() as folder:
                self.ask(folder, "What is a poisoned replica?")
                assert self.ask(folder, "-c", "And then?")

        @undisturbed()
        def texts() -> Iterator[str]:
            with tempfile.TemporaryDirectory() as folder:
                command, environment = self.command(folder, LONG, limit=150)
                with subprocess.Popen(
                    command, stdout=subprocess.PIPE, env=environment, stdin=subprocess.DEVNULL
                ) as process:
                    while data := os.read(process.stdout.fileno(), 4096):
                        yield data.decode()
                assert process.returncode == 0
