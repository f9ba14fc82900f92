"""The farms that `furrow serve` and `furrow run` started for this user on this machine: each has a folder with the URL
of its private server."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from control.errors import SettingsError

ANSWER_S = 0.5
"""For a connection to a server of this machine."""


def state_folder() -> Path:
    """The user's folder for what Furrow keeps between runs: $XDG_STATE_HOME/furrow, or ~/.local/state/furrow. It may
    not exist yet."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "furrow"


def serve_folder(port: int) -> Path:
    """The data of `furrow serve` on this port, where no other folder is named."""
    return state_folder() / f"serve-{port}"


def run_folder() -> Path:
    """The folder with the private farms of `furrow run`."""
    return state_folder() / "run"


def local_farms(*, of_serve: bool = False) -> list[Path]:
    """The data folders of the farms that run now; `of_serve`: those of `furrow serve` alone."""
    folders = sorted(state_folder().glob("serve-*"))
    if not of_serve:
        folders += sorted(run_folder().glob("farm-*/redis"))
    return [folder for folder in folders if _answers(folder)]


def local_farm() -> Path | None:
    """The only farm that runs now; one of `furrow serve` goes before those of `furrow run`. None where there is none.
    Raises SettingsError where there are several."""
    running = local_farms()
    serving = [farm for farm in running if farm.parent == state_folder()]
    for farms in (serving, running):
        if len(farms) > 1:
            raise SettingsError(f"several farms run here; name one: {' or '.join(f'--redis {farm}' for farm in farms)}")
        if farms:
            return farms[0]
    return None


def _answers(folder: Path) -> bool:
    """True if the server of this folder takes connections; a killed one leaves its files."""
    with suppress(OSError, ValueError):
        port = int((folder / "port").read_text())
        if (folder / "url").exists():
            with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S):
                return True
    return False
