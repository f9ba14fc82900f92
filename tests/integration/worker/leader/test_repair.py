"""A leader repairs a log that Redis changed: after a failover to a server that lagged; repaired or believed."""

from __future__ import annotations

from typing import Any

import pytest
import redis as redis_py

from control import requests
from control.errors import RedisUnavailable
from tests.integration.worker.conftest import MODEL, REPLICA
from tests.integration.worker.leader_scene import KV_TOKENS, LeaderScene
from worker.leader import exchange as exchange_module

ROLL_BACK = """
local entries = redis.call('XRANGE', KEYS[1], '-', '+')
redis.call('DEL', KEYS[1])
local kept = #entries - tonumber(ARGV[1])
for i = 1, kept do redis.call('XADD', KEYS[1], entries[i][1], unpack(entries[i][2])) end
redis.call('HSET', KEYS[2], 'seq', kept)
"""


RUN_AHEAD = """
local seq = tonumber(redis.call('HGET', KEYS[2], 'seq'))
for i = seq + 1, seq + 10 do redis.call('XADD', KEYS[1], i .. '-0', 'e', '[' .. i .. ',0,' .. ARGV[i] .. ']') end
redis.call('HSET', KEYS[2], 'seq', seq + 10)
"""


def run_ahead(scene: LeaderScene, rid: str, tokens: list[int | None]) -> None:
    """Ten more tokens of the answer are in the log than the leader knows of."""
    scene.redis.client.eval(RUN_AHEAD, 2, scene.keys.log(rid), scene.keys.request(rid), *map(str, tokens))


def roll_back(scene: LeaderScene, rid: str, entries: int) -> None:
    """A failover that had not replicated the last entries."""
    scene.redis.client.eval(ROLL_BACK, 2, scene.keys.log(rid), scene.keys.request(rid), entries)


def test_a_log_that_lost_its_end_gets_it_from_memory(scene: LeaderScene) -> None:
    """After a failover to a server that lagged: the leader sends again what is missing, and computes nothing anew."""
    scene.ask("whole")
    expected = scene.answer("whole")
    before = scene.epoch()
    scene.ask("struck")
    scene.under_way("struck")
    roll_back(scene, "struck", entries=5)
    assert scene.answer("struck") == expected
    assert [entry.seq for entry in scene.log("struck")] == list(range(1, len(expected) + 1))
    assert scene.epoch() == before
    assert scene.redis.client.hget(scene.keys.request("struck"), "attempts") == "1"


def test_a_log_that_is_ahead_is_believed(scene: LeaderScene) -> None:
    """A request that was continued elsewhere starts over from the log."""
    scene.ask("whole")
    expected = scene.answer("whole")
    before = scene.epoch()
    scene.ask("struck")
    scene.under_way("struck")
    run_ahead(scene, "struck", expected)
    assert scene.answer("struck") == expected
    assert scene.epoch() > before, "the fault had no effect"


def one_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's next call finds no Redis."""
    real, calls = exchange_module.run, [1]

    def run(*args: Any) -> Any:
        if calls and calls.pop():
            raise RedisUnavailable("a test says so")
        return real(*args)

    monkeypatch.setattr(exchange_module, "run", run)


def test_an_end_that_a_failover_lost_is_reached_again(scene: LeaderScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader has forgotten the request, and Redis says again that it runs: after an outage the leader asks."""
    tenant = [scene.keys.queue("normal", "t"), scene.keys.served("normal"), scene.keys.turns("normal")]
    scene.ask("struck")
    scene.under_way("struck")
    with redis_py.Redis.from_url(scene.redis.url) as raw:
        names = [scene.keys.request("struck"), scene.keys.log("struck"), scene.keys.replica(REPLICA).running, *tenant]
        pipeline = raw.pipeline(transaction=True)
        for name in names:
            pipeline.dump(name)
        before = pipeline.execute()
        expected, epoch = scene.answer("struck"), scene.epoch()
        pipeline.delete(*names)
        for name, value in zip(names, before, strict=True):
            if value is not None:
                pipeline.restore(name, 0, value, replace=True)
        pipeline.execute()
    assert scene.state("struck") == "running" and len(scene.log("struck")) < len(expected)
    one_outage(monkeypatch)
    assert scene.answer("struck") == expected
    assert scene.epoch() == epoch


def test_what_redis_ended_during_an_outage_is_let_go(scene: LeaderScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel that meets the count of what is this replica's frees the memory, and costs no epoch."""
    scene.ask("cancelled")
    scene.under_way("cancelled")
    epoch = scene.epoch()
    monkeypatch.setattr(exchange_module.RedisCalls, "was_away", lambda _: True)
    scene.redis.run(requests.cancel(MODEL, "cancelled", "t"))
    scene.answer("cancelled")
    assert scene.state("cancelled") == "cancelled"
    scene.ask("next", prompt=[7] * (KV_TOKENS - 20), max_tokens=20, min_tokens=20)
    assert len(scene.answer("next")) == 20 and scene.epoch() == epoch
