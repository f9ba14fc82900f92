"""Which model a request means: beside models that failed, leave, or are on their way up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from fakeredis import FakeRedis
from tokenizers import normalizers

from api.models.models import LOST_S, ModelRegistry
from api.schemas.view import OWN
from api.settings import ApiSettings
from control.errors import ModelFileRefused, ModelNotFound, ModelUnavailable
from control.keys import METERED
from control.messages import ModelSpec
from control.records import catalog
from control.records.api_reports import CALLS, breaches_of
from control.redis.connection import run
from control.replicas.model_overviews import Overview, ReplicaState
from tests.byte_model import byte_assets, byte_tokenizer

SERVED = ("loaded", "poisoned", "recovering")


def models(*aliases: str, **states: ReplicaState) -> Any:
    """Models by name; those that were `failed` here never had a tokenizer, `gone` are failed ones that served."""
    subject: Any = ModelRegistry(cast(Any, None), ApiSettings(redis_url="redis://nowhere", served_model_names=aliases))
    for name, state in states.items():
        subject._overviews[name] = Overview(name, state, "", 0, 1, 1, 0, None, [])
        if state in SERVED:
            subject._served[name] = ((), SimpleNamespace(assets=byte_assets()))
    return subject


def meant(subject: Any, name: str = "") -> str | None:
    return subject._real_name(name)


def test_the_tag_latest_means_the_name_without_it() -> None:
    """For models and aliases; a model that has the tag in its own name is that one."""
    subject = models("alias=well", **{"well": "loaded", "tagged": "loaded", "tagged:latest": "loaded"})
    names = ("well:latest", "alias:latest", "tagged:latest", "tagged", "well:8b", "other:latest", ":latest")
    assert [meant(subject, name) for name in names] == [
        "well",
        "well",
        "tagged:latest",
        "tagged",
        None,
        None,
        None,
    ]


def test_a_model_with_an_adapter_means_the_model() -> None:
    """Also behind an alias and where any name is taken; a model that has the name itself goes before it."""
    subject = models("alias=well", **{"well": "loaded", "own:sql": "loaded", "own": "loaded"})
    assets = msgspec.structs.replace(byte_assets(), adapters=["sql"])
    subject._served["well"] = subject._served["own"] = ((), SimpleNamespace(assets=assets))
    names = ("well:sql", "alias:sql", "own:sql", "well:other")
    assert [meant(subject, name) for name in names] == ["well", "well", "own:sql", None]
    assert "well:sql" in subject.names and "well:other" not in subject.names


OTHERS: list[ReplicaState] = ["failed", "loading", "draining", "unloading"]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("healthy", SERVED)
def test_a_model_that_does_not_serve_is_no_second_one(healthy: ReplicaState, other: ReplicaState) -> None:
    """No name, an alias and `*` mean the model that serves, also while it recovers."""
    subject = models("public", "*", a=other, well=healthy)
    assert [meant(subject, name) for name in ("", "public", "whatever")] == ["well"] * 3
    assert meant(subject, "a") == "a", "its own name means it, and tells why it does not serve"


def test_a_model_that_failed_after_it_had_served_is_no_second_one() -> None:
    """Its tokenizer is still known; it takes no requests."""
    subject = models("public", well="loaded", old="recovering")
    assert meant(subject) is None and meant(subject, "public") is None
    subject._overviews["old"] = models(old="failed")._overviews["old"]
    assert meant(subject) == meant(subject, "public") == "well"


def test_two_models_that_serve_must_be_named() -> None:
    """A request without a model is refused where several are loaded."""
    subject = models("public", one="loaded", two="recovering")
    assert meant(subject) is None and meant(subject, "public") is None and meant(subject, "one") == "one"


@pytest.mark.parametrize(
    ("states", "only"),
    [
        ({"a": "failed"}, "a"),
        ({"a": "failed", "b": "loading"}, "b"),
        ({"a": "failed", "b": "failed"}, None),
        ({"a": "loading", "b": "loading"}, None),
        ({}, None),
    ],
)
def test_where_nothing_serves_the_only_candidate_is_meant(states: dict[str, ReplicaState], only: str | None) -> None:
    """Its refusal tells why: that it failed, or that it is not there yet."""
    assert meant(models(**states)) == only


@pytest.mark.parametrize(
    ("state", "target"), [("failed", "well"), ("loading", "well"), ("unloading", "well"), ("loaded", "taken")]
)
def test_a_model_takes_an_alias_over_only_once_it_serves(state: ReplicaState, target: str) -> None:
    """A load under the name of an alias that fails leaves the alias as it was."""
    subject = models("taken=well", well="loaded", taken=state)
    assert meant(subject, "taken") == target
    assert meant(models("taken=well", well="failed", taken=state), "taken") == "taken"


def test_an_alias_of_a_model_that_is_gone_is_told_as_before() -> None:
    """The refusal names the model that the alias means."""
    assert meant(models("public=gone", well="loaded"), "public") == "gone"


def test_the_list_begins_with_what_serves() -> None:
    """Clients take the first one; each model is there, and an alias as long as it means one."""
    subject = models("z", "alias=well", a="failed", well="loaded", b="loading")
    assert subject.names == ["alias", "well", "z", "a", "b"]
    assert models("z", a="failed", b="failed").names == ["a", "b"]


@pytest.fixture
def empty() -> FakeRedis:
    """A server that has lost its data."""
    return FakeRedis(decode_responses=True)


@pytest.mark.parametrize(
    ("asked", "unloaded", "error"),
    [
        ("m", False, ModelUnavailable),
        ("", False, ModelUnavailable),
        ("public", False, ModelUnavailable),
        ("other", False, ModelNotFound),
        ("m", True, ModelNotFound),
        ("", True, ModelNotFound),
    ],
)
async def test_a_lost_model_is_unavailable(
    asked: str, unloaded: bool, error: type[Exception], empty: FakeRedis
) -> None:
    """Redis may have lost its data: clients are told to retry. An unloaded model left its name, and is not there."""
    subject = models("public", m="loaded")
    subject._client = subject._reader._client = empty
    if unloaded:
        empty.sadd(METERED, "m")
    with pytest.raises(error):
        await subject.resolve(asked)


async def test_a_lost_model_is_unknown_after_a_while(empty: FakeRedis) -> None:
    """One that no agent brings back is not there."""
    subject = models(m="loaded")
    subject._client = subject._reader._client = empty
    with pytest.raises(ModelUnavailable):
        await subject.resolve("m")
    subject._lost["m"] -= LOST_S
    with pytest.raises(ModelNotFound):
        await subject.resolve("m")


def endless() -> str:
    """A tokenizer that works for many seconds on any text with an `a`."""
    tokenizer = byte_tokenizer()
    growing = [normalizers.Replace("a", "a" * 100)] * 3
    tokenizer.normalizer = normalizers.Sequence([*growing, *[normalizers.Replace("a", "a")] * 60])
    return tokenizer.to_str()


def publish(client: FakeRedis, name: str, **assets: Any) -> None:
    catalog.put_spec(client, ModelSpec(name=name, source="script"))
    run(client, catalog.put_assets(name, byte_assets(**assets)))


class Waiting(ModelRegistry):
    """Control: a look waits for trials."""

    async def _look_once(self, shared: bool) -> None:
        await super()._look_once(shared)
        await asyncio.gather(*(trial for _, trial in self._trials.values()))


@pytest.mark.parametrize("kind", [ModelRegistry, Waiting])
async def test_a_tokenizer_that_hangs_delays_no_other_model(
    kind: type[ModelRegistry], empty: FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own requests are to be retried until it is refused; a model that is loaded meanwhile is served."""
    monkeypatch.setattr("api.models.confined.DEADLINE_S", 1.0)
    monkeypatch.setattr("api.models.models.TRIAL_WAIT_S", 0.01)
    subject: Any = kind(empty, ApiSettings(redis_url="redis://nowhere"))
    publish(empty, "hostile", tokenizer_json=endless())
    try:
        await subject.look()
        publish(empty, "other")
        await subject.look()
        other = await subject.resolve("other")
        assert other.name == "other" and other in await subject.all_served()
        if kind is Waiting:
            assert not subject._trials, "the control has waited for it"
        else:
            with pytest.raises(ModelUnavailable, match="being tried") as caught:
                await subject.resolve("hostile")
            assert caught.value.retry_after and [other] == await subject.all_served()
            await subject._trials["hostile"][1]
        with pytest.raises(ModelFileRefused, match="tokenizer of the model 'hostile'"):
            await subject.resolve("hostile")
        [breach] = breaches_of(empty, ["hostile"])["hostile"]
        assert breach.file == "tokenizer" and "took more than 1.0 s" in breach.deed
    finally:
        await subject.stop()


async def test_operators_are_told_of_calls_that_are_not_understood(empty: FakeRedis, tmp_path: Path) -> None:
    """Of a model that takes tools in a form that is not known; not where a form is known, given, or not needed."""
    odd, known = "{{ tools }} [[call]]", "{{ tools }}<arg_key><arg_value>"
    for name, template in {"odd": odd, "glm": known, "plain": "{{ messages }}"}.items():
        publish(empty, name, chat_template=template)
    subject: Any = ModelRegistry(empty, ApiSettings(redis_url="redis://nowhere"))
    await subject.look()
    await subject.look()
    breaches = breaches_of(empty, ["odd", "glm", "plain"])
    assert [breach.file for breach in breaches["odd"]] == [CALLS] and not breaches["glm"] and not breaches["plain"]
    file = tmp_path / "form.json"
    file.write_text(json.dumps({"fields": {"tool_calls": {"open": "[[", "close": "]]", "content": "json"}}}))
    given: Any = ModelRegistry(empty, ApiSettings(redis_url="redis://nowhere", response_template=str(file)))
    await given.look()
    assert [(await given.resolve(name)).forms.calls for name in ("odd", "glm")] == [OWN, OWN]


async def test_a_chat_template_may_be_given(empty: FakeRedis, tmp_path: Path) -> None:
    """It is rendered, and told by, in place of the model's own."""
    publish(empty, "odd", chat_template="{{ tools }}")
    file = tmp_path / "template.jinja"
    file.write_text("{{ tools }}<arg_key><arg_value>")
    subject: Any = ModelRegistry(empty, ApiSettings(redis_url="redis://nowhere", chat_template=str(file)))
    await subject.look()
    served = await subject.resolve("odd")
    assert served.forms.calls == "glm" and served.template.render({"tools": 3}) == "3<arg_key><arg_value>"


async def test_an_unusual_tokenizer_is_served_after_its_trial(empty: FakeRedis) -> None:
    """A request waits for it; a new epoch of the same files needs none."""
    subject: Any = ModelRegistry(empty, ApiSettings(redis_url="redis://nowhere"))
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("b", "c" * 60), normalizers.Replace("c", "dd")])
    publish(empty, "m", tokenizer_json=tokenizer.to_str())
    try:
        await subject.look()
        trial = subject._trials["m"][1]
        publish(empty, "m", tokenizer_json=tokenizer.to_str(), kv_tokens=77, created=5)
        await subject.look()
        assert subject._trials["m"][1] is trial
        await trial
        served = await subject.resolve("m")
        assert served.prepared and not served.encodes and served.assets.kv_tokens == 77
        await subject.look()
        assert not subject._trials
    finally:
        await subject.stop()
