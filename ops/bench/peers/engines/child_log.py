"""The output of a child process, kept to explain an unexpected end."""

from __future__ import annotations

import tempfile

LINES = 3


class ChildLog:
    """A file without a name, until `close`."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(prefix="furrow-bench-")  # noqa: SIM115  # it lives as long as the child

    def close(self) -> None:
        self.file.close()

    def last_words(self) -> str:
        """The last lines, in one."""
        self.file.seek(0)
        lines = self.file.read().decode(errors="replace").strip().splitlines()
        return " / ".join(lines[-LINES:]) or "it said nothing"
