"""The terminal of a conversation: lines with a history, and text of the model without control characters."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from control.operations.local_farms import state_folder
from ops.cli.tables import plain

PROMPT, CONTINUED = ">>> ", "... "
QUOTES = '"""'
LARGEST_HISTORY = 2**20
"""Bytes of the file, of which the newer half is kept beyond that."""


class Input(NamedTuple):
    """The typed text, without triple quotes; `command`: it begins with a slash, and not with a quote."""

    text: str
    command: bool


class Terminal:
    """Reads what the user types and prints what the model answers."""

    def __init__(self, commands: Sequence[str], keep_history: bool = True) -> None:
        completer = WordCompleter(list(commands), sentence=True)
        self._session: PromptSession[str] = PromptSession(
            history=_history() if keep_history else InMemoryHistory(),
            completer=completer,
            complete_while_typing=False,
            enable_history_search=True,
        )

    def read(self) -> Input:
        """One input; texts between triple quotes have several lines. Raises EOFError for Ctrl-D, KeyboardInterrupt for
        Ctrl-C."""
        line = self._session.prompt(PROMPT)
        command = line.startswith("/")
        if line.count(QUOTES) != 1:
            return Input(line.replace(QUOTES, ""), command)
        lines = [line]
        while QUOTES not in lines[-1] or len(lines) == 1:
            lines.append(self._session.prompt(CONTINUED))
        return Input("\n".join(lines).replace(QUOTES, "").strip("\n"), command)


def write(text: str, dim: bool = False) -> None:
    """Print a part of an answer."""
    clean = plain(text)
    if clean:
        sys.stdout.write(click.style(clean, dim=True) if dim and "NO_COLOR" not in os.environ else clean)
        sys.stdout.flush()


@contextmanager
def without_echo() -> Generator[None]:
    """Keys that are pressed during an answer don't appear in it. Ctrl-C works, and the keys are read afterwards."""
    try:
        before = termios.tcgetattr(sys.stdin.fileno())
    except (OSError, ValueError, termios.error):
        yield
        return
    silent = [*before[:3], before[3] & ~(termios.ECHO | termios.ECHONL), *before[4:]]
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, silent)
    try:
        yield
    finally:
        with suppress(OSError, termios.error):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, before)


def _history() -> History:
    """In a file that only this user can read, else in memory."""
    path = state_folder() / "run-history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        path.chmod(0o600)
        _shorten(path)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _shorten(path: Path) -> None:
    size = path.stat().st_size
    if size <= LARGEST_HISTORY:
        return
    with path.open("r+b") as file:
        file.seek(size - LARGEST_HISTORY // 2)
        newer = file.read().partition(b"\n\n")[2]  # whole entries: an empty line ends one
        file.seek(0)
        file.write(newer)
        file.truncate()
