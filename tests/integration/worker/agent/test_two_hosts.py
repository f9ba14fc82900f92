"""A group under two agents has the tokens of one rank: as if on two hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from control import requests
from control.keys import ModelKeys
from control.messages import GenerationRequest, ModelSpec, Sampling
from control.placement import membership
from control.records import catalog
from control.replicas import health, model_overviews
from control.requests import Enqueue
from control.requests.token_log import read_log
from tests.farm import clean_environment
from tests.integration.worker.conftest import MODEL, ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.models import make
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

LONG = 160


@contextmanager
def agent(redis: ReplicaRedis, host: str) -> Iterator[subprocess.Popen[bytes]]:
    """The agent of `host`, in a process of its own; its ranks die with it."""
    environment = clean_environment(FURROW_REDIS_URL=redis.url, FURROW_HOST_ID=host, FURROW_STANDBY="0")
    process = subprocess.Popen([sys.executable, "-m", "worker.agent.supervision"], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def load(redis: ReplicaRedis, name: str, folder: Path) -> None:
    """A model of two ranks on two hosts, once it serves."""
    catalog.put_spec(
        redis.client, ModelSpec(name=name, source=str(folder), tp=2, dtype="float64", kv_tokens=1000, spread=True)
    )
    until(lambda: model_overviews.overview(redis.client, name).state == "loaded", 90.0)


def undisturbed(redis: ReplicaRedis, folder: Path) -> list[int | None]:
    """The tokens of one rank on one host, which leaves nothing in Redis."""
    scene = LeaderScene(redis, folder)
    ask(redis, MODEL, "r")
    expected = answer(redis, MODEL, "r")
    scene.stop()
    redis.client.flushall()
    return expected


def ask(redis: ReplicaRedis, model: str, rid: str) -> None:
    sampling = Sampling(max_tokens=LONG, min_tokens=LONG, temperature=0.8, seed="7")
    params = GenerationRequest(prompt=[10, 20, 30, 40], sampling=sampling)
    redis.run(requests.enqueue(Enqueue(rid=rid, model=model, params=params, tenant="t")))


def tokens(redis: ReplicaRedis, model: str, rid: str) -> list[int | None]:
    return [entry.token for entry in redis.run(read_log(model, rid, 0))]


def under_way(redis: ReplicaRedis, model: str, rid: str) -> None:
    until(lambda: len(tokens(redis, model, rid)) >= 20, 30.0)
    assert len(tokens(redis, model, rid)) < LONG, "it must be struck while it runs"


def answer(redis: ReplicaRedis, model: str, rid: str) -> list[int | None]:
    until(lambda: redis.client.hget(ModelKeys(model).request(rid), "state") == "finished", 60.0)
    return tokens(redis, model, rid)


def hosts_of(redis: ReplicaRedis, model: str) -> list[str]:
    """The host of each rank, as the ranks say."""
    beats = health.heartbeats(redis.client, model, "r0", 2)
    return [beat.host if beat else "" for beat in beats]


def test_a_group_over_two_hosts_has_the_tokens_of_one_rank_and_survives(redis: ReplicaRedis, tmp_path: Path) -> None:
    """Token by token: undisturbed, through the death of the other host's rank, and through the loss of that host."""
    folder = make("llama", tmp_path / "llama")
    expected = undisturbed(redis, folder)
    assert len(expected) == LONG
    with ExitStack() as stack:
        stack.enter_context(agent(redis, "one"))
        other = stack.enter_context(agent(redis, "two"))
        until(lambda: len(membership.living_hosts(redis.client)) == 2, 30.0)
        load(redis, "spread", folder)
        assert sorted(hosts_of(redis, "spread")) == ["one", "two"]
        assert model_overviews.overview(redis.client, "spread").replicas[0].host in ("one,two", "two,one")
        ask(redis, "spread", "whole")
        assert answer(redis, "spread", "whole") == expected

        for strike, rid in ((kill_rank, "rank"), (kill_agent, "host")):
            epoch = health.read_epoch(redis.client, "spread", "r0")
            ask(redis, "spread", rid)
            under_way(redis, "spread", rid)
            strike(redis, other)
            assert answer(redis, "spread", rid) == expected
            assert health.read_epoch(redis.client, "spread", "r0") > epoch, "the fault had no effect"
        assert hosts_of(redis, "spread") == ["one", "one"], "the ranks of a lost host go to one that lives"


def kill_rank(redis: ReplicaRedis, _agent: subprocess.Popen[bytes]) -> None:
    """kill -9 of the rank on host two; its own agent starts it again."""
    beats = health.heartbeats(redis.client, "spread", "r0", 2)
    [pid] = [beat.pid for beat in beats if beat is not None and beat.host == "two"]
    os.kill(pid, signal.SIGKILL)


def kill_agent(_redis: ReplicaRedis, agent: subprocess.Popen[bytes]) -> None:
    """kill -9 of host two's agent, with which its rank dies: nobody is left there."""
    agent.kill()
