"""Sleeping models are listed without a tokenizer: it is made for the first request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakeredis import FakeRedis

from api.models import models as models_module
from api.models.models import KEPT_ASLEEP, ModelRegistry
from api.settings import ApiSettings
from control.errors import ModelNotFound, ModelUnavailable
from control.messages import ModelSpec
from control.placement import farm
from control.placement.demand import Demand
from control.records import catalog
from control.redis.connection import run
from control.replicas import health
from tests.byte_model import byte_assets


@pytest.fixture
def redis() -> FakeRedis:
    return FakeRedis(decode_responses=True)


def offer(client: FakeRedis, *names: str, published: bool = True) -> None:
    """Models on demand, whose assets the agent that plans has read from their files."""
    for name in names:
        catalog.put_spec(client, ModelSpec(name=name, source="script", min_replicas=0))
        if published:
            run(client, catalog.put_assets(name, byte_assets()))


def subject_of(client: FakeRedis) -> Any:
    return ModelRegistry(client, ApiSettings(redis_url="redis://nowhere"))


async def test_a_tokenizer_is_made_for_the_first_request(redis: FakeRedis) -> None:
    """Of many models few are used: each takes megabytes."""
    offer(redis, "a", "b")
    subject = subject_of(redis)
    await subject.look()
    assert subject.names == ["a", "b"] and subject.overview("a").state == "sleeping" and not subject._served
    assert (await subject.resolve("a")).name == "a"
    assert list(subject._served) == ["a"]
    await subject.look()
    assert list(subject._served) == ["a"]


async def test_the_latest_ones_are_kept(redis: FakeRedis) -> None:
    names = [f"m{index}" for index in range(KEPT_ASLEEP + 2)]
    offer(redis, *names)
    subject = subject_of(redis)
    for name in names:
        await subject.resolve(name)
    await subject.look()
    assert sorted(subject._served) == names[2:]


async def test_one_with_requests_has_its_tokenizer_on_any_process(redis: FakeRedis) -> None:
    offer(redis, "a")
    redis.hset("furrow:{a}:load", "queued", 1)
    subject = subject_of(redis)
    await subject.look()
    assert list(subject._served) == ["a"]


async def test_the_files_of_a_model_that_is_new_are_waited_for(
    redis: FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(redis, "a", published=False)
    subject = subject_of(redis)
    waiting = asyncio.create_task(subject.resolve("a"))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    offer(redis, "a")
    assert (await waiting).name == "a"
    monkeypatch.setattr(models_module, "FILES_WAIT_S", 0.1)
    offer(redis, "b", published=False)
    with pytest.raises(ModelUnavailable, match="retry shortly"):
        await subject.resolve("b")


async def test_the_stage_of_a_load_is_told(redis: FakeRedis) -> None:
    offer(redis, "a")
    subject = subject_of(redis)
    await subject.look()
    assert subject.load_stage("a") == "loading" and subject.load_stage("unknown") is None
    run(redis, farm.put_demand("a", Demand(replicas=0, detail="waits for memory that other models use")))
    await subject.look()
    assert subject.load_stage("a") == "waits for memory that other models use"
    run(redis, farm.put_demand("a", Demand(replicas=1)))
    fields = {"downloaded_bytes": 40, "download_bytes": 100}
    health.write_status(redis, "a", "r0", "starting", "downloading", host="h", **fields)
    await subject.look()
    assert subject.load_stage("a") == "loading 40 %" and subject.overview("a").state == "loading"


async def test_a_short_name_means_the_one_model_that_it_fits(redis: FakeRedis) -> None:
    """As users of Ollama write them; several are listed, and a name without a colon is never cut short."""
    offer(redis, "Qwen/Qwen3-0.6B-GGUF", "Qwen3-8B-Q4_K_M", "Qwen3-8B-Q8_0", "gemma-3-270m")
    subject = subject_of(redis)
    for short, name in {
        "qwen3:0.6b": "Qwen/Qwen3-0.6B-GGUF",
        "qwen3:8b-q4_K_M": "Qwen3-8B-Q4_K_M",
        "gemma:3-270m": "gemma-3-270m",
        "gemma:3": "gemma-3-270m",
    }.items():
        assert (await subject.resolve(short)).name == name
    with pytest.raises(ModelNotFound) as caught:
        await subject.resolve("qwen3:8b")
    assert "Qwen3-8B-Q4_K_M, Qwen3-8B-Q8_0." in str(caught.value)
    for unknown in ("qwen3", "gemma-3", "qwen3:0", "qwen3:1.7b", ":", "qwen:"):
        with pytest.raises(ModelNotFound):
            await subject.resolve(unknown)
