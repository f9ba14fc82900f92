"""What a leader sends while its next step runs, on a real server: order, outages, and the end of an epoch."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from control import requests
from control.errors import Lost, RedisUnavailable
from control.lease import Lease
from control.messages import GenerationRequest, LogEntry, Sampling
from control.requests import Emission, Enqueue
from tests.farm import until
from tests.integration.worker.conftest import MODEL, ReplicaRedis
from worker import exchange as exchange_module
from worker.exchange import Exchange


class Scene:
    """A leader's exchange, and one request in its hands."""

    def __init__(self, redis: ReplicaRedis) -> None:
        self.redis = redis
        self.lease: Lease = redis.lead_for_good(1)
        params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=9))
        redis.run(requests.enqueue(Enqueue(rid="r", model=MODEL, params=params, tenant="t")))
        redis.run(requests.claim(self.lease, 1, 100, adopt=False))
        self.exchange = Exchange(redis.another(), redis.blocking(), self.lease, lambda: None)

    def start(self, seq: int) -> None:
        row = Emission("r", seq, [LogEntry(seq, 0, 40 + seq)])
        self.exchange.start([row], requests.claim(self.lease, 1, 100, adopt=False))

    def logged(self) -> int:
        return self.redis.client.xlen(self.lease.model_keys.log("r"))


@pytest.fixture
def scene(redis: ReplicaRedis) -> Scene:
    return Scene(redis)


def away(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Redis is away until the event is set."""
    real, back = exchange_module.run_every, threading.Event()

    def run_every(*args: Any) -> Any:
        if not back.is_set():
            raise RedisUnavailable("a test says so")
        return real(*args)

    monkeypatch.setattr(exchange_module, "run_every", run_every)
    monkeypatch.setattr(exchange_module, "AWAY_S", 0.01)
    return back


def test_it_goes_on_by_itself_and_is_asked_for_its_answer_once(scene: Scene) -> None:
    """Nobody waits for it to begin; what it found is there when it is asked for, and then there is nothing more."""
    with scene.exchange:
        scene.start(1)
        until(lambda: scene.logged() == 1, 40.0)
        answer = scene.exchange.finish()
        assert answer is not None and answer[0].behind == {} and answer[1].requests == []
        assert scene.exchange.finish() is None


def test_a_step_that_runs_meanwhile_holds_what_the_last_one_produced(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage is waited out in the background, nothing is lost, and afterwards it is known that there was one."""
    back = away(monkeypatch)
    with scene.exchange:
        scene.start(1)
        until(lambda: scene.exchange.was_away(), 40.0)
        assert scene.logged() == 0
        back.set()
        assert scene.exchange.finish() is not None
        assert scene.logged() == 1


def test_leaving_the_epoch_lets_it_get_through(scene: Scene) -> None:
    """What was under way when a step failed is logged before anybody says that the epoch is poisoned."""
    with scene.exchange:
        scene.start(1)
    assert scene.logged() == 1


def test_leaving_the_epoch_does_not_wait_for_redis(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Redis it is given up: the next epoch computes the step again."""
    away(monkeypatch)
    with scene.exchange:
        scene.start(1)
        until(lambda: scene.exchange.was_away(), 40.0)
    assert scene.logged() == 0
    with pytest.raises(Lost):
        scene.exchange.finish()


def test_a_script_that_redis_can_not_serve_just_now_is_an_outage(scene: Scene) -> None:
    """Out of memory: the tokens wait as for a server that is away, and are taken once there is room."""
    scene.redis.client.config_set("maxmemory", 1)
    try:
        with scene.exchange:
            scene.start(1)
            until(lambda: scene.exchange.was_away(), 40.0)
            scene.redis.client.config_set("maxmemory", 0)
            answer = scene.exchange.finish()
            assert answer is not None and scene.logged() == 1
    finally:
        scene.redis.client.config_set("maxmemory", 0)
