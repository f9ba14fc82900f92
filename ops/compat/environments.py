"""Where clients are installed: a folder each, made by one command, so that none meets another's dependencies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from control.errors import SettingsError
from ops.compat.clients import Client

FOLDER = "FURROW_CLIENTS"
"""The environment variable that names the folder of all environments."""
_STAMP = "installed.json"
"""Written last: a folder without it is half an installation."""
INSTALL_LIMIT_S = 900.0
SCRIPTS = Path(__file__).parent / "scripts"


def root() -> Path:
    """FURROW_CLIENTS, or a folder in the user's cache."""
    given = os.environ.get(FOLDER)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "furrow" / "clients"


def folder(client: Client) -> Path:
    return root() / client.name


def version(client: Client) -> str | None:
    """Of the installed client; None where there is none."""
    stamp = folder(client) / _STAMP
    return json.loads(stamp.read_text())["version"] if stamp.is_file() else None


def missing(client: Client) -> str | None:
    """Why the client can't be run here; None where it can."""
    if version(client) is None:
        return f"{client.name} is not installed: python -m ops.compat install {client.name}"
    if client.kind == "node" and shutil.which("node") is None:
        return f"{client.name} needs node, which is not here"
    return None


def install(client: Client) -> str:
    """Make the client's environment anew; its version. Raises SettingsError with the installer's own words."""
    place = folder(client)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    found = _install_python(client, place) if client.kind == "python" else _install_node(client, place)
    (place / _STAMP).write_text(json.dumps({"version": found, "packages": client.packages}))
    return found


def command(client: Client) -> list[str]:
    """The command line of the client's script in its environment."""
    place = folder(client)
    if client.script.endswith(".py"):
        # A program of Node is driven by a script that needs no package.
        python = _python(place) if client.kind == "python" else sys.executable
        return [str(python), str(SCRIPTS / client.script)]
    # Node looks for packages beside the file that imports them.
    for script in SCRIPTS.glob("*.mjs"):
        shutil.copy(script, place)
    return ["node", str(place / client.script)]


def programs(client: Client) -> Path:
    """The folder of the programs that the client's packages bring."""
    return folder(client) / ("bin" if client.kind == "python" else "node_modules/.bin")


def _python(place: Path) -> Path:
    return place / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def _install_python(client: Client, place: Path) -> str:
    venv.create(place, with_pip=True)
    _run([str(_python(place)), "-m", "pip", "install", "--quiet", *client.packages])
    ask = f"import importlib.metadata as m; print(m.version({client.package!r}))"
    return _run([str(_python(place)), "-c", ask]).strip()


def _install_node(client: Client, place: Path) -> str:
    npm = shutil.which("npm")
    if npm is None:
        raise SettingsError(f"{client.name} needs npm, which is not here. Install Node.js 20 or newer.")
    _run([npm, "install", "--silent", "--no-save", "--prefix", str(place), *client.packages])
    return json.loads((place / "node_modules" / client.package / "package.json").read_text())["version"]


def _run(what: list[str]) -> str:
    done = subprocess.run(what, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    if done.returncode != 0:
        raise SettingsError(f"{' '.join(what[:4])} … failed: {(done.stderr or done.stdout)[-800:]}")
    return done.stdout
