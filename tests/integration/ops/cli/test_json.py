"""`--json` of every command that lists or shows, on a farm in the middle of its work and on an empty one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from control.redis.connection import connect
from ops.cli import cli
from tests.integration.ops.populated import MODEL, Populated, populate
from tests.servers import Server

LISTS: dict[str, tuple[str, ...]] = {
    "models list": (),
    "ps": (),
    "top": ("--once",),
    "hosts": (),
    "history": (MODEL,),
    "requests list": (),
    "keys list": (),
    "keys usage": (),
    "dead list": (MODEL,),
    "cache list": (),
}
"""Commands that print an array."""
SHOWS = {"requests show": "running", "dead show": "dead", "keys show": "key", "doctor": "", "show": ""}
"""Commands that print an object, and what of the farm they are asked for."""
ELSEWHERE = {"selftest", "run"}
"""Commands whose JSON is tested beside them: they run models."""


@pytest.fixture
def populated(new_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Populated]:
    cache = tmp_path / "furrow" / "weights"
    cache.mkdir(parents=True)
    (cache / "m-int8.weights").write_bytes(b"1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("REDIS_URL", new_server.url)
    with connect(new_server.url) as client:
        client.flushall()
        yield populate(client, new_server.url)


def asked(name: str, *words: str) -> Any:
    ended = CliRunner().invoke(cli, [*name.split(), *words, "--json"])
    assert ended.exit_code == 0 or name == "doctor", (name, ended.output)
    return json.loads(ended.output)


def commands(group: click.Group, names: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*names, name))
        elif command is not None:
            assert command.name == name, f"{name} is no command"
            yield " ".join((*names, name)), command


def test_every_command_that_lists_prints_an_array_of_objects(populated: Populated) -> None:
    """Each has something to list here; names of fields are lower case, and no secret is among them."""
    for name, words in LISTS.items():
        rows = asked(name, *words)
        if name != "keys usage":  # nothing has been used yet
            assert rows, name
        for row in rows:
            assert all(field == field.lower() for field in row), name
            assert "sha256" not in row


def test_every_command_that_shows_prints_an_object(populated: Populated) -> None:
    """By the id that the list has."""
    for name, field in SHOWS.items():
        words = {"": [], "dead": [MODEL, populated.dead]}.get(field, [getattr(populated, field, "")])
        found = asked(name, *(words if name != "show" else [MODEL]))
        assert isinstance(found, dict) and found, name


def test_nothing_is_an_empty_array(populated: Populated, tmp_path: Path) -> None:
    """And not a sentence, which scripts could not read. The history of an unknown model is an error."""
    populated.client.flushall()
    (tmp_path / "furrow" / "weights" / "m-int8.weights").unlink()
    for name, words in LISTS.items():
        if name not in ("history", "top"):  # top takes a second
            assert asked(name, *words) == [], name


def test_no_command_that_lists_is_left_out() -> None:
    """Every command named list, show or usage has the option, and every command with the option is tested."""
    found = dict(commands(cli))
    for name, command in found.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert name.rpartition(" ")[2] not in ("list", "show", "usage") or "--json" in options, name
    known = {name for name, command in found.items() if any("--json" in one.opts for one in command.params)}
    assert known - ELSEWHERE == {*LISTS, *SHOWS}
