"""A coding agent's command line on the scripted model: a tool call, a second turn, an answer whose leader is killed.

An agent keeps its home, its configuration and its project in one temporary folder.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from checks import ORDERED, SCRIPTED_URL, check, main, order

BIN = Path(os.environ["COMPAT_BIN"])
"""The folder of the client's programs."""
LIMIT_S = 90.0
ENDS = "The file is written."
LONG = " ".join(f"line {number}" for number in range(80))


class Agent:
    """`project` is the working directory of every call."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.home = folder / "home"
        self.project = folder / "project"
        self.home.mkdir()
        self.project.mkdir()
        kept = {
            name: os.environ[name]
            for name in ("PATH", "LANG", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
            if name in os.environ
        }
        self._environment = kept | {"HOME": str(self.home), "TERM": "dumb"} | environment

    def run(self, *command: str | Path) -> str:
        """The standard output. Raises AssertionError with the program's last words where it fails or takes too long."""
        where = {"cwd": self.project, "env": self._environment, "timeout": LIMIT_S}
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **where)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"no end within {LIMIT_S:g} s: {str(error.stdout or error.stderr)[-200:]}") from error
        assert done.returncode == 0, (done.stderr + done.stdout)[-280:]
        return done.stdout


Prepare = Callable[[Path], Agent]
"""Makes an agent with its configuration in a folder."""
Ask = Callable[[Agent, str, bool], str]
"""Asks one turn and returns the last text of the agent; True continues the last conversation."""


def coding_agent(prepare: Prepare, ask: Ask, write: dict[str, object], made: str) -> None:
    """Run the checks of an agent. The order `write` makes it write "hello" into the file `made`."""

    @contextmanager
    def prepared() -> Iterator[Agent]:
        assert SCRIPTED_URL, "it needs the farm whose model takes orders"
        with tempfile.TemporaryDirectory(prefix="furrow-agent-") as folder:
            yield prepare(Path(folder))

    @check(ORDERED)
    def two_turns() -> None:
        with prepared() as agent:
            said = ask(agent, f"Please write the file. {order(**write)}", False)
            assert ENDS in said, f"the end is {said[-200:]!r}"
            assert "hello" in (agent.project / made).read_text(), f"{made} has {(agent.project / made).read_text()!r}"
            said = ask(agent, f"Thanks. {order(say='You are welcome.')}", True)
            assert "You are welcome." in said, f"the second turn is {said[-200:]!r}"

    @check("an answer whose leader is killed in the middle")
    def killed() -> None:
        with prepared() as agent:
            said = ask(agent, f"Count lines. {order(say=LONG, dies=True)}", False)
            assert LONG in " ".join(said.split()), f"{said[-200:]!r} is the whole text"

    main()
