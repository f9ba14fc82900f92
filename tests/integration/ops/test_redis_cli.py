"""Snippets of ops/redis-cli.md say what their text claims: on the oldest server and on the newest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import asdict

from control import keys
from control.redis.connection import connect
from control.version import VERSION
from tests.integration.ops.cheat_sheet import SHEET, ask, pairs, questions, shell_blocks
from tests.integration.ops.populated import FORMATION, HOST, MODEL, OWNER, WEIGHTS, Populated, populate
from tests.servers import NEW, OLD, Server, serving

CHECKS: dict[str, Callable[[list[str], Populated], None]] = {}
REPLICAS = {"Why is a replica poisoned?": "r1"}
"""Questions that are asked about another replica than r0."""


@pytest.fixture(scope="module", params=[OLD, NEW], ids=["old", "new"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving(request.param, "appendonly yes") as running:
        yield running


@pytest.fixture
def populated(server: Server) -> Iterator[Populated]:
    client = connect(server.url)
    client.flushall()
    yield populate(client, server.url)
    client.close()


@pytest.mark.parametrize("question", questions())
def test_the_answer_is_what_the_text_claims(
    question: str, populated: Populated, server: Server, tmp_path: Path
) -> None:
    """The snippet runs as it stands and shows the state that was put there."""
    replica = REPLICAS.get(question, "r0")
    variables = {
        "MODEL": MODEL,
        "REPLICA": replica,
        "TENANT": "acme",
        "RID": populated.running,
        "HOST": HOST,
        "KEY": populated.key,
    }
    lines = ask(questions()[question], server.socket, tmp_path, **variables)
    CHECKS[question](lines, populated)


def test_the_sheet_is_complete_and_short() -> None:
    """Each question has a check, each check its question, and no answer needs more than three commands."""
    assert set(CHECKS) == set(questions())
    for question, snippet in questions().items():
        assert 1 <= snippet.count("redis-cli ") <= 3, question
    assert len(shell_blocks(SHEET.read_text())) == len(questions())


def test_a_silent_rank_shows_no_values(populated: Populated, server: Server, tmp_path: Path) -> None:
    """Each field of a rank without a heartbeat is empty."""
    populated.client.delete(populated.lease.keys.heartbeat(1))
    snippet = questions()["How far is a replica, and which rank is slow?"]
    lines = ask(snippet, server.socket, tmp_path, MODEL=MODEL, REPLICA="r0")
    assert lines[9:] == [""] * 9


def test_a_free_lock_is_shown_as_such(populated: Populated, server: Server, tmp_path: Path) -> None:
    """An empty owner, and the TTL of a key that does not exist."""
    populated.client.delete(populated.lease.keys.lock)
    lines = ask(questions()["Who holds the lock?"], server.socket, tmp_path, MODEL=MODEL, REPLICA="r0")
    assert lines == ["", "-2", str(populated.lease.epoch)]


def check(question: str) -> Callable[[Callable[[list[str], Populated], None]], None]:
    def register(function: Callable[[list[str], Populated], None]) -> None:
        CHECKS[question] = function

    return register


@check("What is queued?")
def _(lines: list[str], populated: Populated) -> None:
    at = min(lines.index("acme"), lines.index("zeta"))
    load = pairs(lines[:at])
    assert (load["queued"], load["queued_tokens"], load["ended"]) == ("2", "24", "1")
    assert float(load["rate"]) > 0
    tenants = {name: lines[lines.index(name) + 1] for name in ("acme", "zeta")}
    assert all(score.isdigit() for score in tenants.values())
    rids = [line for line in lines if line.startswith("rid-")]
    assert rids == [populated.running, populated.waiting]


@check("Which requests run, and on which replica?")
def _(lines: list[str], populated: Populated) -> None:
    entry = populated.client.hget(keys.ModelKeys(MODEL).request(populated.running), "entry")
    assert lines[:5] == ["1", entry, entry, "r0", "1"]
    assert lines[5:7] == [entry, "r0"]
    assert int(lines[7]) >= 0


@check("What is a request's state, and where did its time go?")
def _(lines: list[str], populated: Populated) -> None:
    assert lines[:6] == ["running", "r0", "1", "7", "3", ""]
    received, enqueued, claimed, prefill, first, last, delivered = lines[6:]
    assert (received, prefill, delivered) == ("1000", "1234", "")
    assert int(enqueued) <= int(claimed) <= int(first)
    assert last == ""  # it goes on


@check("What did a request produce so far?")
def _(lines: list[str], populated: Populated) -> None:
    assert lines[:2] == ["3", "0"]
    assert lines[2::3] == ["1-0", "2-0", "3-0"]
    assert [json.loads(entry)[:3] for entry in lines[4::3]] == [[1, 0, 101], [2, 0, 102], [3, 0, 103]]


@check("What runs where?")
def _(lines: list[str], populated: Populated) -> None:
    assert lines[0] == MODEL
    at = lines.index("state")
    spec, status = pairs(lines[1:at]), pairs(lines[at:])
    assert (spec["source"], spec["tp"], spec["replicas"], spec["devices"]) == (
        "somewhere/demo",
        "2",
        "2",
        '["cpu","cpu"]',
    )
    assert (status["state"], status["host"], status["detail"]) == ("running", HOST, "")


@check("How far is a change rolled out?")
def _(lines: list[str], populated: Populated) -> None:
    assert lines[:2] == ["1", "2"]
    assert json.loads(pairs(lines[2:4])["r0"]) == {"revision": 1, "tp": 2}
    assert pairs(lines[4:]) == {"r0": WEIGHTS}


@check("How far is a replica, and which rank is slow?")
def _(lines: list[str], populated: Populated) -> None:
    first = ["41", "1900", "0", "0", "4000", "300", "ready", "cpu", "4711"]
    assert lines == [*first, "40", "1800", "0", "0", "4000", "300", "ready", "cpu", "4712"]


@check("Who holds the lock?")
def _(lines: list[str], populated: Populated) -> None:
    token, life, epoch = lines
    assert token == f"{OWNER}:{populated.lease.epoch}"
    assert int(life) > 0
    assert epoch == str(populated.lease.epoch)


@check("Why is a replica poisoned?")
def _(lines: list[str], populated: Populated) -> None:
    at = next(i for i, line in enumerate(lines) if "-" in line and line.replace("-", "").isdigit())
    poison, history = pairs(lines[:at]), pairs(lines[at + 1 :])
    for told in (poison, history):
        assert (told["epoch"], told["rank"], told["kind"]) == (str(populated.poisoned.epoch), "1", "exited")
        assert told["message"] == "rank 1 (pid 12) was killed"


@check("How did the latest epochs come to be?")
def _(lines: list[str], _populated: Populated) -> None:
    written = pairs(lines[1:])
    assert {name: int(value) for name, value in written.items()} == asdict(FORMATION)


@check("What are the ranks told?")
def _(lines: list[str], populated: Populated) -> None:
    assert lines[0] == "1-0"
    command, answer = json.loads(lines[2]), json.loads(lines[5])
    assert (command["op"], command["seq"], command["epoch"]) == ("ping", 1, populated.lease.epoch)
    assert (answer["op"], answer["seq"], answer["rank"]) == ("pong", 1, 1)


@check("What is in the dead letters?")
def _(lines: list[str], populated: Populated) -> None:
    assert lines[0] == "1"
    letter = pairs(lines[2:])
    assert (letter["rid"], letter["attempts"], letter["seq"]) == (populated.dead, "1", "0")
    assert letter["cause"] == "crashed its group alone: forward_failed"
    assert json.loads(letter["params"])["prompt"] == [0, 1, 2, 3, 4]


@check("Who is suspected of a crash?")
def _(lines: list[str], populated: Populated) -> None:
    assert lines[0] == "r0"
    docket = json.loads(lines[1])
    assert (docket["epoch"], docket["tried"], docket["alone"]) == (populated.lease.epoch, {populated.running: 5}, True)
    assert (docket["guilty"], docket["rest"], docket["lone"]) == ([populated.running], [], {})
    assert lines[2:] == ["", "1", "1", "running", ""]


@check("Which responses are stored, and which of them have not ended?")
def _(lines: list[str], populated: Populated) -> None:
    assert lines[0] == f"{populated.running} acme" and int(lines[1]) > 0
    assert lines[2:7] == ["acme", MODEL, "rid-0", '[{"id":"i"}]', ""]
    assert 0 < int(lines[7]) <= 60_000


@check("Which hosts are alive, and what were they given?")
def _(lines: list[str], populated: Populated) -> None:
    assert lines[0] == HOST
    host = pairs(lines[1:13])
    assert (host["version"], host["devices"], host["pid"], host["standby"]) == (VERSION, "cuda:0", "99", "off")
    assert host["engines"] == "furrow"
    assert lines[13] == f"{MODEL} r0"
    assignment = json.loads(lines[14])
    assert (assignment["ranks"], assignment["devices"], assignment.get("withdrawn", False)) == (
        [0, 1],
        ["cpu", "cpu"],
        False,
    )


@check("What does an agent know of its host?")
def _(lines: list[str], populated: Populated) -> None:
    facts = json.loads(lines[0])
    assert (facts["version"], facts["files"][MODEL]["fingerprint"]) == (VERSION, WEIGHTS)
    assert {"clock_ms", "models", "cache", "shared_memory", "compiler", "native", "ports"} <= set(facts)


@check("Who plans, and which API processes are alive?")
def _(lines: list[str], populated: Populated) -> None:
    assert lines == [HOST, "api-7", "furrow:api:api-7"]


@check("Which requests does nobody follow?")
def _(lines: list[str], populated: Populated) -> None:
    rid, due = lines
    assert rid == populated.left
    seconds, _ = populated.client.time()
    assert 500 < int(due) / 1000 - int(seconds) < 601


@check("Which API keys are there, and what did one use?")
def _(lines: list[str], populated: Populated) -> None:
    assert lines[0] == populated.key
    record = pairs(lines[1:-4])
    assert (record["name"], record["tenant"], record["rpm"], len(record["sha256"])) == ("acme", "acme", "60", 64)
    assert lines[-4:] == ["1", "", "", ""]


@check("Is the server itself fit?")
def _(lines: list[str], populated: Populated) -> None:
    assert lines[:2] == ["maxmemory-policy", "noeviction"]
    told = dict(line.strip().split(":") for line in lines[2:])
    assert (told["aof_enabled"], told["aof_last_write_status"]) == ("1", "ok")
    assert told["used_memory_human"][-1] in "KMG"
