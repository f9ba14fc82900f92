"""`--json` and tables of every listing command: on a farm in the middle of its work, on an empty one, and on one whose
names and causes are hostile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from control import access, requests
from control.messages import GenerationRequest, ModelSpec, Sampling
from control.placement import membership
from control.placement.placement import Host
from control.records import catalog
from control.redis.connection import connect, run
from control.replicas import health
from control.requests import Enqueue
from ops.cli import cli, main
from ops.cli.tables import LONGEST_LINE
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
ELSEWHERE = {"list", "selftest", "run", "models plan", "models rebalance"}
"""Commands whose JSON is tested beside them: they run or move models, or read files of models."""


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
        answer = asked(name, *(words if name != "show" else [MODEL]))
        assert isinstance(answer, dict) and answer, name


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


EVIL = "x\x1b]0;title\x07\x9b2J\x1b[2J\r\nFORGED \u202e\u2066" + 10_000 * "y"
NAME = "x\x1b]0;title\x07\u202e" + 100 * "y"
"""As EVIL, as far as the name of a model may be so."""
ACTS = (
    *("models pause NAME", "models resume NAME", "models scale NAME --replicas 2", "models reload NAME"),
    *("drain EVIL --no-wait", "drain EVIL --undo", "drain ABSENT", "requests cancel TENANT", "dead retry MODEL LETTER"),
    *("keys limits KEY --rpm 5", "keys revoke KEY", "models unload NAME"),
)


def make_hostile(populated: Populated) -> dict[str, str]:
    """Write hostile text wherever a client, a model, a host or another operator can; the ids by the words of ACTS."""
    client, lease = populated.client, populated.lease
    catalog.put_spec(client, ModelSpec(name=NAME, source=EVIL))
    health.write_status(client, NAME, "r0", "failed", EVIL, host=EVIL)
    health.write_status(client, MODEL, "r0", "running", EVIL, host=EVIL)
    membership.beat_host(client, Host(EVIL, (EVIL,)), pid=1, memory_bytes=1)
    beat = health.Beat(
        epoch=lease.epoch, seq=1, oldest_pending_ms=0, device=EVIL, memory_bytes=1, phase=EVIL, pid=7, host=EVIL
    )
    run(client, health.beat(MODEL, "r0", 0, beat))
    params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=5))
    for rid in ("letter", "tenant"):
        run(client, requests.enqueue(Enqueue(rid=rid, model=MODEL, params=params, tenant=EVIL, priority="high")))
        if rid == "letter":
            run(client, requests.claim(lease, 1, 1000))
            assert run(client, requests.bury(lease, rid, EVIL))
    assert health.write_poison(client, MODEL, "r0", lease.epoch, 0, "exited", EVIL)
    key, _ = access.mint(name="k", tenant="t")  # names of keys are checked
    access.create(client, key)
    return {
        "NAME": NAME,
        "EVIL": EVIL,
        "ABSENT": "absent" + EVIL,
        "KEY": key.id,
        "TENANT": "tenant",
        "LETTER": "letter",
    }


def test_text_of_others_moves_no_cursor_and_forges_no_line(
    populated: Populated, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a table and in a message, on a terminal and in a pipe; a name of 10 kB does not fill the screen."""
    words = make_hostile(populated)
    shows = [f"requests show {found}" for found in ("letter", "tenant")]
    shows += [f"keys show {words['KEY']}", "show NAME", f"show {MODEL}", "doctor"]
    lists = [" ".join((name, *rest)) for name, rest in LISTS.items()]
    monkeypatch.setattr("ops.cli.top.EVERY_S", 0.01)
    hostile = 0
    for line in [*lists, *shows, *ACTS]:
        with pytest.raises(SystemExit):
            main([words.get(word, MODEL if word == "MODEL" else word) for word in line.split()])
        output = "".join(capsys.readouterr())
        assert output, line
        wrong = {
            one
            for one in output
            if (ord(one) < 0x20 and one != "\n") or 0x7F <= ord(one) < 0xA0 or one in "\u202e\u2066"
        }
        assert not wrong, (line, wrong)
        assert not [one for one in output.splitlines() if one.startswith("FORGED")], line
        assert max(map(len, output.splitlines())) <= 2 * LONGEST_LINE, line
        hostile += "yyy" in output
    assert hostile >= 15
