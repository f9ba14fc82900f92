"""A leader calls Redis while its step runs: order, outages, and the end of an epoch, on a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psutil
import pytest

from control import requests
from control.errors import Fenced
from control.messages import GenerationRequest, LogEntry, Sampling
from control.replicas.lease import Lease
from control.requests import Emission, Enqueue
from tests.integration.worker.conftest import MODEL, ReplicaRedis
from tests.waiting import until
from worker.leader.exchange import DeadReplicas, Exchange, RedisCalls


class Scene:
    """A leader's exchange, and one request in its hands."""

    def __init__(self, redis: ReplicaRedis) -> None:
        self.redis = redis
        self.lease: Lease = redis.lead_for_good(1)
        params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=9))
        redis.run(requests.enqueue(Enqueue(rid="r", model=MODEL, params=params, tenant="t")))
        redis.run(requests.claim(self.lease, 1, 100))
        client = redis.another()
        calls = RedisCalls(client, redis.blocking(), self.lease, lambda: self.when_away())
        self.exchange = Exchange(self.lease, calls, DeadReplicas(client, self.lease))
        self.when_away: Callable[[], object] = lambda: None
        """Called whenever the exchange has met the absence of Redis."""

    def start(self, seq: int) -> None:
        row = Emission("r", seq, [LogEntry(seq, 0, 40 + seq)])
        self.exchange.start([row], requests.claim(self.lease, 1, 100))

    def logged(self) -> int:
        return self.redis.client.xlen(self.lease.model_keys.log("r"))


@pytest.fixture
def scene(redis: ReplicaRedis) -> Scene:
    return Scene(redis)


@pytest.fixture
def stopped(scene: Scene) -> Iterator[psutil.Process]:
    """The server's process; it goes on at the end of the test."""
    server = psutil.Process(scene.redis.client.info("server")["process_id"])
    yield server
    server.resume()


def test_it_goes_on_by_itself_and_is_asked_for_its_answer_once(scene: Scene) -> None:
    """The call runs in the background. Its result is returned once, when it is asked for."""
    with scene.exchange:
        scene.start(1)
        scene.exchange.finish()  # a new server learns the scripts when the answer is read
        scene.start(2)
        until(lambda: scene.logged() == 2, 40.0)
        answer = scene.exchange.finish()
        assert answer is not None and answer.claims is not None
        assert answer.result.behind == {} and answer.claims.requests == []
        assert scene.exchange.finish() is None


def test_an_outage_holds_what_the_last_step_produced(scene: Scene, stopped: psutil.Process) -> None:
    """It is waited out, nothing is lost, and afterwards it is known that there was one."""
    scene.when_away = stopped.resume
    with scene.exchange:
        stopped.suspend()
        scene.start(1)
        assert scene.exchange.finish() is not None
        assert scene.exchange.was_away() and not scene.exchange.was_away()
        assert scene.logged() == 1


def test_a_lock_that_ran_out_is_taken_again(scene: Scene) -> None:
    """Redis was paused for longer than the lock lives: the step is emitted in the same epoch."""
    scene.redis.client.delete(scene.lease.keys.lock)
    with scene.exchange:
        scene.start(1)
        assert scene.exchange.finish() is not None
    assert scene.exchange.was_away() and scene.logged() == 1
    assert scene.redis.client.get(scene.lease.keys.lock) == scene.lease.token


def test_a_lock_that_another_had_is_not_taken_again(scene: Scene) -> None:
    """Nothing is emitted: the epoch is over."""
    scene.redis.client.delete(scene.lease.keys.lock)
    scene.redis.lead(1, owner="other/2", floor=scene.lease.epoch)
    scene.redis.client.delete(scene.lease.keys.lock)
    with scene.exchange:
        scene.start(1)
        with pytest.raises(Fenced):
            scene.exchange.finish()
    assert scene.logged() == 0


def test_leaving_the_epoch_lets_it_get_through(scene: Scene) -> None:
    """The emission under way when a step fails is logged before the epoch is poisoned."""
    with scene.exchange:
        scene.start(1)
    assert scene.logged() == 1


def test_leaving_the_epoch_does_not_wait_for_redis(scene: Scene, stopped: psutil.Process) -> None:
    """Without Redis it is given up: the next epoch computes the step again."""
    with scene.exchange:
        stopped.suspend()
        scene.start(1)
    assert stopped.status() == psutil.STATUS_STOPPED
    assert scene.exchange.finish() is None


def test_a_script_that_redis_can_not_serve_just_now_is_an_outage(scene: Scene) -> None:
    """Too few replicas: the tokens wait as for a server that is away, and are taken once it writes again."""
    scene.when_away = lambda: scene.redis.client.config_set("min-replicas-to-write", 0)
    scene.redis.client.config_set("min-replicas-to-write", 1)
    with scene.exchange:
        scene.start(1)
        assert scene.exchange.finish() is not None
    assert scene.exchange.was_away() and scene.logged() == 1


def test_a_full_server_takes_the_tokens_of_what_runs(scene: Scene) -> None:
    """Beyond its maxmemory it refuses new requests; the tokens of those that run do not wait."""
    scene.redis.client.config_set("maxmemory", 1)
    with scene.exchange:
        scene.start(1)
        assert scene.exchange.finish() is not None
    assert not scene.exchange.was_away() and scene.logged() == 1
    scene.redis.client.config_set("maxmemory", 0)
