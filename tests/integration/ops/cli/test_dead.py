"""`furrow dead` lists, retries and drops: as an operator types it, against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from control import requests
from control.errors import LetterNotFound
from control.messages import GenerationRequest, Sampling
from control.redis.connection import connect, run
from control.replicas.lease import acquire
from control.requests import Enqueue
from ops.cli.requests import dead
from tests.servers import Server

MODEL, RID = "m", "0123"

Ask = Callable[..., Result]


@pytest.fixture
def ask(new_server: Server) -> Ask:
    """Runs `furrow dead` on a farm with one dead letter."""
    with connect(new_server.url) as client:
        client.flushall()
        lease = run(client, acquire(MODEL, "r0", "host/1", 1))
        assert lease is not None
        params = GenerationRequest(prompt=[7, 8, 9], sampling=Sampling(max_tokens=5))
        run(client, requests.enqueue(Enqueue(rid=RID, model=MODEL, params=params, tenant="t")))
        run(client, requests.claim(lease, 1, 100))
        assert run(client, requests.bury(lease, RID, "crashed its group alone"))
    return lambda *words: CliRunner().invoke(dead, [*words, "--redis", new_server.url])


def test_the_list_names_request_and_cause(ask: Ask) -> None:
    """One line for each letter, and words where there is none."""
    assert ask("list", MODEL).output.split()[1:4] == [RID, "3", "crashed"]
    assert ask("list", "other").output == "No dead letters of 'other'.\n"


def test_show_has_all_that_reproduces_it(ask: Ask) -> None:
    """As JSON: the prompt, the sampling, the cause."""
    shown = json.loads(ask("show", MODEL, RID).output)
    assert shown["params"]["prompt"] == [7, 8, 9] and shown["params"]["sampling"]["max_tokens"] == 5
    assert (shown["id"], shown["cause"], shown["attempts"]) == (RID, "crashed its group alone", 1)


def test_retry_says_under_which_id_it_runs(ask: Ask, new_server: Server) -> None:
    """The request waits again, and its letter is gone."""
    again = ask("retry", MODEL, RID).output.rpartition(" ")[2].strip(".\n")
    with connect(new_server.url) as client:
        assert client.hget(requests_key(again), "state") == "queued"
    assert "No dead letters" in ask("list", MODEL).output


def test_drop_forgets_it(ask: Ask) -> None:
    """Afterwards every verb says that there is none."""
    assert ask("drop", MODEL, RID).exit_code == 0
    for verb in ("show", "retry", "drop"):
        refused = ask(verb, MODEL, RID)
        assert refused.exit_code != 0 and isinstance(refused.exception, LetterNotFound)


def requests_key(rid: str) -> str:
    return f"furrow:{{{MODEL}}}:req:{rid}"
