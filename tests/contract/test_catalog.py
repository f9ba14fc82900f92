"""Specifications and assets of models are hashes in Redis."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from redis.exceptions import ResponseError

from control import keys
from control.constants import ASSETS_LEFT_MS
from control.errors import RedisUnavailable
from control.messages import ModelAssets, ModelSpec
from control.operations import desired
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import Call
from tests.contract.conftest import MODEL, Farm

SPEC = ModelSpec(name=MODEL, source="/x", tp=2, devices=["cpu", "cpu"], max_context=64)
ASSETS = ModelAssets(
    tokenizer_json='{"version": "1.0"}',
    tokenizer_config={"eos_token": "</s>"},
    chat_template=None,
    generation_config={"temperature": 0.5},
    context_length=64,
    vocab_size=10,
    eos_ids=[1, 2],
    kv_tokens=1000,
    created=5,
)


def test_a_specification_comes_back_as_it_was(farm: Farm) -> None:
    """Fields travel as text and return as what they were."""
    assert catalog.get_spec(farm.client, MODEL) is None
    catalog.put_spec(farm.client, SPEC)
    assert catalog.get_spec(farm.client, MODEL) == SPEC
    assert catalog.list_specs(farm.client) == [SPEC]
    assert farm.client.hget(farm.keys.spec, "source") == "/x"


def test_the_revision_grows_with_changes_only(farm: Farm) -> None:
    """Saying the same twice changes nothing; leaving a field out is a change."""
    assert [catalog.put_spec(farm.client, SPEC) for _ in range(2)] == [1, 1]
    changed = msgspec.structs.replace(SPEC, max_context=None)
    assert catalog.put_spec(farm.client, changed) == 2
    stored = catalog.get_spec(farm.client, MODEL)
    assert stored is not None
    assert stored.max_context is None
    assert catalog.same(stored, changed)


@pytest.mark.parametrize("followed", [{"replicas": 3}, {"drain_s": 5}, {"surge": False}, {"paused": True}])
def test_what_replicas_can_follow_is_no_new_revision(farm: Farm, followed: dict[str, Any]) -> None:
    """It is written down all the same; with anything else, or when asked for, the revision grows once."""
    assert catalog.put_spec(farm.client, SPEC) == 1
    changed = msgspec.structs.replace(SPEC, **followed)
    assert catalog.put_spec(farm.client, changed) == 1
    assert catalog.get_spec(farm.client, MODEL) == changed
    assert catalog.put_spec(farm.client, msgspec.structs.replace(SPEC, tp=1)) == 2
    assert catalog.put_spec(farm.client, msgspec.structs.replace(SPEC, tp=1), again=True) == 3


def test_a_tombstone_asks_for_an_unload(farm: Farm) -> None:
    """It stays until somebody wants the model again, or it is forgotten."""
    assert catalog.tombstone(farm.client, MODEL) is False
    catalog.put_spec(farm.client, SPEC)
    assert [catalog.tombstone(farm.client, MODEL) for _ in range(2)] == [True, True]
    stored = catalog.get_spec(farm.client, MODEL)
    assert stored is not None
    assert (stored.unload, stored.revision) == (True, 2)
    catalog.forget(farm.client, SPEC)
    assert catalog.list_specs(farm.client) == []


@pytest.mark.parametrize("sent", range(6))
def test_an_unload_that_is_cut_off_can_be_finished(farm: Farm, monkeypatch: pytest.MonkeyPatch, sent: int) -> None:
    """After any number of round trips the planner sees the model, or its name is free."""
    catalog.put_spec(farm.client, SPEC)
    farm.run(catalog.put_assets(MODEL, ASSETS))
    assert catalog.tombstone(farm.client, MODEL)
    allowed = iter(range(sent))

    def cut(name: str) -> Callable[[SyncRedis, Any], Any]:
        real = getattr(catalog, name)

        def call(client: SyncRedis, calls: Any) -> Any:
            if next(allowed, None) is None:
                raise RedisUnavailable("cut off")
            return real(client, calls)

        return call

    with monkeypatch.context() as patches:
        for name in ("run", "run_all", "run_every"):
            patches.setattr(catalog, name, cut(name))
        with pytest.raises(RedisUnavailable) if sent < 5 else nullcontext():
            catalog.forget(farm.client, SPEC)
    for stored in catalog.list_specs(farm.client):
        catalog.forget(farm.client, stored)
    assert catalog.get_spec(farm.client, MODEL) is None
    assert catalog.get_assets(farm.client, MODEL) is None
    catalog.put_spec(farm.client, SPEC)
    assert catalog.list_specs(farm.client) == [SPEC]


@pytest.mark.parametrize("unload", [False, True])
def test_a_specification_without_a_name_is_found_again(farm: Farm, unload: bool) -> None:
    """By the same load, or an unload, after a load that was cut off between the two."""
    catalog.put_spec(farm.client, SPEC)
    farm.client.srem(keys.MODELS, MODEL)
    if unload:
        desired.unload(farm.client, MODEL)
    else:
        assert not desired.load(farm.client, SPEC, None).changed
    assert [spec.unload for spec in catalog.list_specs(farm.client)] == [unload]


def test_assets_that_could_not_be_put_aside_end_no_unload(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model loaded under the name would be served with the tokenizer of the one before it."""
    catalog.put_spec(farm.client, SPEC)
    with monkeypatch.context() as patches:
        patches.setattr(catalog, "run_all", lambda _client, _calls: [ResponseError("NOPERM no permission"), 1])
        with pytest.raises(ResponseError, match="NOPERM"):
            catalog.forget(farm.client, SPEC)
    assert catalog.list_specs(farm.client) == [SPEC]


def test_a_model_that_is_loaded_while_it_is_forgotten_is_known(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the removal of the specification and that of the name."""
    catalog.put_spec(farm.client, SPEC)
    real = catalog.run

    def loading(client: SyncRedis, call: Call[Any]) -> Any:
        if call.args[0] == "SREM":
            catalog.put_spec(client, SPEC)
        return real(client, call)

    monkeypatch.setattr(catalog, "run", loading)
    catalog.forget(farm.client, SPEC)
    assert catalog.list_specs(farm.client) == [SPEC]


def test_restoring_fills_a_loss_and_overrules_nobody(farm: Farm) -> None:
    """A model that an agent still runs is restored with its revision; a newer spec is kept."""
    catalog.restore_spec(farm.client, msgspec.structs.replace(SPEC, revision=7))
    stored = catalog.get_spec(farm.client, MODEL)
    assert stored is not None
    assert stored.revision == 7
    catalog.restore_spec(farm.client, msgspec.structs.replace(SPEC, revision=3, tp=1))
    assert catalog.get_spec(farm.client, MODEL) == stored


def test_assets_come_back_and_keep_their_first_date(farm: Farm) -> None:
    """Publishing the same in a new epoch is no change; anything else is."""
    assert catalog.get_assets(farm.client, MODEL) is None
    assert farm.run(catalog.put_assets(MODEL, ASSETS)) is True
    assert farm.run(catalog.put_assets(MODEL, msgspec.structs.replace(ASSETS, created=9))) is False
    assert catalog.get_assets(farm.client, MODEL) == ASSETS
    assert farm.run(catalog.put_assets(MODEL, msgspec.structs.replace(ASSETS, chat_template="{{ x }}"))) is True
    assets_now = catalog.get_assets(farm.client, MODEL)
    assert assets_now is not None
    assert assets_now.chat_template == "{{ x }}"


def test_assets_are_left_for_a_while_by_a_model_that_is_unloaded(farm: Farm) -> None:
    """They are none of a model that is loaded under the name then; a repeat leaves them as they are."""
    catalog.put_spec(farm.client, SPEC)
    farm.run(catalog.put_assets(MODEL, ASSETS))
    for _ in range(2):
        catalog.forget(farm.client, SPEC)
        assert catalog.get_assets(farm.client, MODEL) is None
        assert catalog.get_assets_left(farm.client, MODEL) == ASSETS
    assert 0.9 * ASSETS_LEFT_MS < farm.client.pttl(farm.keys.assets_left) <= ASSETS_LEFT_MS


def test_fields_of_a_newer_version_are_ignored(farm: Farm) -> None:
    """An older process reads what it knows."""
    catalog.put_spec(farm.client, SPEC)
    farm.client.hset(farm.keys.spec, "colour", "blue")
    assert catalog.get_spec(farm.client, MODEL) == SPEC
