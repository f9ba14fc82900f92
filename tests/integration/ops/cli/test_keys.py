"""`furrow keys` creates, limits and revokes: as an operator types it, against a real server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

from control import access, requests
from control.errors import KeyNotFound, SettingsError
from control.messages import GenerationRequest, ModelSpec, Sampling
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import connect, run
from control.requests import Enqueue
from ops.cli.keys import keys, moment
from tests.servers import Server

Ask = Callable[..., Result]


@pytest.fixture
def client(new_server: Server) -> Iterator[SyncRedis]:
    with connect(new_server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
def ask(client: SyncRedis, new_server: Server) -> Ask:
    return lambda *words: CliRunner().invoke(keys, [*words, "--redis", new_server.url])


def test_the_secret_is_shown_once(ask: Ask, client: SyncRedis) -> None:
    """Alone on standard output, so that a script can take it; no verb shows it, or its hash, again."""
    made = ask("create", "--name", "ada", "--rpm", "5", "--model", "b", "--model", "a", "--expires", "1d")
    secret = made.stdout.strip()
    key = run(client, access.get(access.key_id_of(secret) or ""))
    assert key is not None and key.sha256 == access.hash_secret(secret)
    assert (key.rpm, key.models, key.expires // 86_400) == (5, ["a", "b"], int(time.time()) // 86_400 + 1)
    shown = ask("show", "ada").output
    assert json.loads(ask("show", "ada", "--json").output)["rpm"] == 5
    for text in (shown, ask("list", "--all").output, made.stderr):
        assert secret not in text and key.sha256 not in text


def test_the_list_shows_revoked_keys_only_with_all(ask: Ask) -> None:
    """Words where there is none; what was revoked is in it only when asked for."""
    assert "furrow keys create" in ask("list").output
    ask("create", "--name", "ada", "--admin")
    ask("create", "--name", "eve", "--tenant", "team")
    assert ask("revoke", "eve").output.endswith("(eve): revoked.\n")
    assert [line.split()[1] for line in ask("list").output.splitlines()] == ["NAME", "ada"]
    everything = [line.split()[1:4] for line in ask("list", "--all").output.splitlines()[1:]]
    assert ["eve", "team", "revoked"] in everything and len(everything) == 2


def test_limits_change_what_is_named(ask: Ask, client: SyncRedis) -> None:
    """And nothing else; nothing named is an error, and so is a key that is not there."""
    ask("create", "--name", "ada", "--rpm", "5", "--tpm", "100", "--model", "a")
    assert ask("limits", "ada", "--rpm", "0", "--max-concurrent", "3", "--all-models").exit_code == 0
    key = access.find(client, "ada")
    assert (key.rpm, key.tpm, key.max_concurrent, key.models) == (0, 100, 3, [])
    assert isinstance(ask("limits", "ada").exception, SettingsError)
    assert isinstance(ask("limits", "eve", "--rpm", "1").exception, KeyNotFound)


def test_usage_by_day_and_model(ask: Ask, client: SyncRedis) -> None:
    """One line per day, key and model, of everybody or of one key, under the key's name."""
    assert ask("usage").output == "Nothing was used.\n"
    ask("create", "--name", "ada")
    key = access.find(client, "ada")
    catalog.put_spec(client, ModelSpec(name="m", source="s"))
    params = GenerationRequest(prompt=[7, 8, 9], sampling=Sampling(max_tokens=5))
    for rid, account in (("a", key.id), ("b", "other")):
        run(client, requests.enqueue(Enqueue(rid=rid, model="m", params=params, tenant="t", account=account)))
        run(client, requests.cancel("m", rid, "t"))
    assert [line.split()[1:5] for line in ask("usage").output.splitlines()[1:]] in (
        [[key.id, "ada", "m", "1"], ["other", "-", "m", "1"]],
        [["other", "-", "m", "1"], [key.id, "ada", "m", "1"]],
    )
    assert len(ask("usage", "ada", "--days", "1").output.splitlines()) == 2


def test_expires_accepts_a_duration_or_a_date() -> None:
    """From now, or a date; anything else is refused with what is accepted."""
    assert moment("2d", 1000.0) == 1000 + 2 * 86_400
    assert moment("15m", 1000.0) == 1900
    assert moment("1970-01-02", 0.0) == 86_400
    with pytest.raises(SettingsError, match="'soon' is no time"):
        moment("soon", 0.0)
