"""A program on a pseudo-terminal, which is its controlling terminal: keys go in, and what it shows comes out."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.farm import clean_environment

_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[()][A-Z0-9]|[=>78cDEHM])")
_TAKE = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


@dataclass
class Terminal:
    """The terminal's side of a program."""

    process: subprocess.Popen[bytes]
    master: int
    raw: bytes = b""
    mark: int = 0
    _reader: threading.Thread | None = field(default=None, repr=False)

    @property
    def text(self) -> str:
        """All that was shown, without escape sequences."""
        return _ESCAPE.sub("", self.raw.decode(errors="replace")).replace("\r", "")

    def send(self, keys: str) -> None:
        """Press keys."""
        os.write(self.master, keys.encode())

    def line(self, text: str) -> None:
        """Type a line and Enter."""
        self.send(text + "\r")

    def expect(self, pattern: str, seconds: float = 60.0) -> re.Match[str]:
        """Wait for a text after the one that was expected last. Raises AssertionError with what was shown."""
        deadline = time.monotonic() + seconds
        while (match := re.compile(pattern).search(text := self.text, self.mark)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{text[self.mark :][-3000:]}"
            assert self.process.poll() is None or _still(self), f"it ended; no {pattern!r} in:\n{text[-3000:]}"
            time.sleep(0.005)
        self.mark = match.end()
        return match

    def read(self) -> None:
        """Collect the output until the program has closed the terminal."""
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return
            if not data:
                return
            self.raw += data


def _still(terminal: Terminal) -> bool:
    """True while output of an ended program may still come."""
    reader = terminal._reader
    if reader is not None:
        reader.join(1.0)
    return reader is not None and reader.is_alive()


@contextmanager
def on_terminal(*arguments: str, **extra: str) -> Generator[Terminal]:
    """`furrow` with these arguments on a terminal of 100 columns; it is killed at the end if it still runs."""
    master, slave = pty.openpty()
    environment = clean_environment(
        TERM="xterm", COLUMNS="100", LINES="40", PROMPT_TOOLKIT_NO_CPR="1", NO_COLOR="1", **extra
    )
    command = [sys.executable, "-c", _TAKE, sys.executable, "-m", "ops.cli", *arguments]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    )
    os.close(slave)
    terminal = Terminal(process, master)
    terminal._reader = threading.Thread(target=terminal.read, daemon=True)
    terminal._reader.start()
    try:
        yield terminal
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        terminal._reader.join(5)
        os.close(master)
