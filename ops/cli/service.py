"""`furrow service`: units of systemd for this user, printed or written. Nothing needs root."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from control.errors import SettingsError
from ops.cli.tables import echo_line

PARTS = ("serve", "worker", "api")
KEPT = ("FURROW_REDIS_URL", "REDIS_URL", "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN", "XDG_CACHE_HOME", "FURROW_WEIGHT_CACHE")
"""Variables of this environment that the unit gets, as a service has none of them. The unit may hold a password, and
only its user can read it."""
PASS_ON = {"ignore_unknown_options": True}


@click.group()
def service() -> None:
    """Run a part of Furrow as a service of this user, by systemd.

    \b
    furrow service install serve smollm2 --port 8000
    furrow service install worker
    """


@service.command(context_settings=PASS_ON)
@click.argument("part", type=click.Choice(PARTS))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--print", "only_print", is_flag=True, help="Print the unit and write nothing.")
def install(part: str, arguments: Sequence[str], only_print: bool) -> None:
    """Write a unit that runs `furrow PART ARGUMENTS`, and print how it is started.

    Name --print before PART: what follows PART is its own.
    """
    unit = unit_of(part, arguments, os.environ)
    if only_print:
        click.echo(unit, nl=False)
        return
    path = unit_path(part)
    write(path, unit)
    name = path.name
    echo_line(f"{path} is written. It starts, now and with each log-in, by:")
    echo_line(f"  systemctl --user daemon-reload && systemctl --user enable --now {name}")
    echo_line(f"  journalctl --user -fu {name}          # its log")
    echo_line("  loginctl enable-linger                # start it with the machine, and keep it after a log-out")


@service.command()
@click.argument("part", type=click.Choice(PARTS))
def uninstall(part: str) -> None:
    """Delete the unit of `furrow PART`."""
    path = unit_path(part)
    if not path.exists():
        raise SettingsError(f"{path} does not exist, so nothing is to be deleted.")
    echo_line(f"If it runs, stop it: systemctl --user disable --now {path.name}")
    path.unlink()
    echo_line(f"{path} is deleted.")


def unit_path(part: str) -> Path:
    base = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return base / "systemd" / "user" / f"furrow-{part}.service"


def unit_of(part: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """The text of the unit."""
    words = [
        _quoted(word).replace("$", "$$") for word in [*_program(), part, *arguments]
    ]  # no variables in the command
    variables = [f"Environment={_quoted(f'{name}={environment[name]}')}" for name in KEPT if environment.get(name)]
    lines = [
        "[Unit]",
        f"Description=Furrow: {part}",
        "",
        "[Service]",
        f"ExecStart={' '.join(words)}",
        *variables,
        "# SIGTERM goes to the parent, which ends its processes in order.",
        "KillMode=mixed",
        "TimeoutStopSec=60",
        "Restart=on-failure",
        "RestartSec=2",
        "",
        "[Install]",
        "WantedBy=default.target",
        "",
    ]
    return "\n".join(lines)


def _program() -> list[str]:
    """The command of this installation by its path: a service has another PATH."""
    beside = Path(sys.executable).with_name("furrow")
    program = str(beside) if beside.exists() else shutil.which("furrow")
    return [program] if program else [sys.executable, "-m", "ops.cli"]


def _quoted(word: str) -> str:
    """A word of a unit: `%` is not replaced, spaces and quotes do not end it. Raises SettingsError."""
    if any(ord(character) < 32 for character in word):
        raise SettingsError(f"{word!r} has a line break or another control character, which a unit can't have.")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if not word or set(word) & set(" \t'\"\\;#") else escaped


def write(path: Path, unit: str) -> None:
    """Whole or not at all, for its user alone. Raises SettingsError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".write")
        fresh.touch(mode=0o600)
        fresh.write_text(unit)
        fresh.replace(path)
    except OSError as error:
        raise SettingsError(f"{path} can't be written: {error}. `--print` prints the unit.") from error
