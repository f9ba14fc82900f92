"""A rank answers each command once: whatever a frame holds, and out of an epoch that is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from control.commands import AnyReply, BatchChange, Bye, ErrorReply, GenerateStep, Ping, Pong, ShutdownRank, UnloadModel
from control.errors import Poisoned
from control.replicas.commands import Deadline, Replies, reply, send
from control.replicas.health import heartbeats, read_poison, write_poison
from control.replicas.lease import Lease
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.waiting import until
from worker.rank.rank import Rank
from worker.rank.rank_worker import RankWorker

WORLD = 2


class RankScene:
    """Rank 1 of two in a thread, and the leader's end of its streams."""

    def __init__(self, redis: ReplicaRedis) -> None:
        self.redis = redis
        self.rank_worker = RankWorker(1, WORLD, "cpu")
        self.rank = Rank(redis.another(), redis.blocking(), redis.another(), MODEL, REPLICA, self.rank_worker)
        self.thread = threading.Thread(target=self.rank.run, daemon=True)
        self.thread.start()
        self.lead()

    def lead(self) -> Lease:
        """Begin an epoch."""
        self.redis.lapse()
        self.lease = self.redis.lead(WORLD)
        self.replies = Replies(self.redis.blocking(), self.lease, WORLD)
        return self.lease

    def say(self, frame: str, seq: int) -> AnyReply:
        """Put any text where the rank reads its commands; its reply."""
        stream = self.redis.keys.commands(self.lease.epoch, 1)
        self.redis.client.xadd(stream, {"m": frame}, id=f"{seq}-0")
        return self.collect(seq)

    def collect(self, seq: int) -> AnyReply:
        [answer] = self.replies.collect(seq, Deadline(5.0))
        return answer

    def ping(self, seq: int) -> AnyReply:
        send(self.redis.client, self.lease, Ping(epoch=self.lease.epoch, seq=seq), WORLD)
        return self.collect(seq)

    def stop(self) -> None:
        """A command ends its wait for one; told to stop, it looks up only every half a second."""
        self.rank.stopping = True
        send(self.redis.client, self.lease, ShutdownRank(epoch=self.lease.epoch, seq=1000), WORLD)
        self.thread.join(40)
        assert not self.thread.is_alive()


@pytest.fixture
def scene(redis: ReplicaRedis) -> Iterator[RankScene]:
    scene = RankScene(redis)
    yield scene
    scene.stop()


def refusal(answer: AnyReply) -> ErrorReply:
    assert isinstance(answer, ErrorReply), answer
    return answer


@pytest.mark.parametrize(
    ("frame", "kind", "says"),
    [
        ('{"op":"teleport","epoch":EPOCH,"seq":1}', "unknown_op", "'teleport'"),
        ('{"op":"unload_model","epoch":EPOCH,"seq":1}', "bad_request", "model_id"),
        ('{"op":"ping","epoch":EPOCH,"seq":"one"}', "bad_request", "seq"),
        ('{"op":"ping"', "bad_request", '{"op":"ping"'),
        ("[1, 2]", "bad_request", "[1, 2]"),
        ("17", "bad_request", "17"),
        ('{"op":7}', "bad_request", '{"op":7}'),
        ('{"epoch":EPOCH,"seq":1}', "bad_request", "op"),
        ('{"op":"generate_step","epoch":EPOCH,"seq":1,"model_id":"m","sequences":[1]}', "bad_request", "change"),
    ],
)
def test_what_it_can_not_understand_is_answered_and_it_lives_on(
    scene: RankScene, frame: str, kind: str, says: str
) -> None:
    """The leader gets one reply, to this very command, that names the fault; the next command is executed."""
    answer = refusal(scene.say(frame.replace("EPOCH", str(scene.lease.epoch)), 1))
    assert (answer.kind, answer.rank) == (kind, 1)
    assert says in answer.message
    assert isinstance(scene.ping(2), Pong)


def test_what_it_refuses_is_a_reply_and_no_poison(scene: RankScene) -> None:
    """A step or an unload of a model that is not here harms nobody: the group goes on."""
    other = {"epoch": scene.lease.epoch, "model_id": "other"}
    for command in (GenerateStep(seq=1, change=BatchChange(), **other), UnloadModel(seq=2, **other)):
        seq = command.seq
        send(scene.redis.client, scene.lease, command, WORLD)
        answer = refusal(scene.collect(seq))
        assert answer.kind == "model_not_loaded" and "'other'" in answer.message
    assert read_poison(scene.redis.client, MODEL, REPLICA) is None
    assert isinstance(scene.ping(3), Pong)


def test_what_nobody_foresaw_is_answered_and_poisons_the_epoch(
    scene: RankScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device state can't be trusted then: the leader gets the reason, the epoch ends, and the next one is clean."""

    def broken(_command: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(scene.rank_worker._handlers, UnloadModel, broken)  # type: ignore[arg-type]
    send(scene.redis.client, scene.lease, UnloadModel(epoch=scene.lease.epoch, seq=1, model_id="m"), WORLD)
    with pytest.raises(Poisoned, match="illegal memory access") as caught:
        scene.collect(1)
        scene.collect(2)  # the reply may be read before the poison is written
    assert (caught.value.kind, caught.value.rank) == ("forward_failed", 1)
    scene.lead()
    assert isinstance(scene.ping(1), Pong)


def test_it_leaves_a_poisoned_epoch_and_a_superseded_one(scene: RankScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both cases it leaves its group, waits, and serves the next epoch with the same process."""
    left: list[int] = []
    monkeypatch.setattr(scene.rank_worker, "leave", lambda: left.append(scene.lease.epoch))
    assert isinstance(scene.ping(1), Pong)
    write_poison(scene.redis.client, MODEL, REPLICA, scene.lease.epoch, 0, "exited", "the leader is gone")
    until(lambda: len(left) == 1, 40.0)
    scene.lead()
    assert isinstance(scene.ping(1), Pong)
    scene.lead()
    until(lambda: len(left) == 2, 40.0)
    assert isinstance(scene.ping(1), Pong)


def test_it_does_not_obey_an_epoch_without_a_leader(redis: ReplicaRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that died whole leaves an epoch unpoisoned and its commands readable: a fresh rank waits for the next."""
    old = redis.lead(WORLD)
    send(redis.client, old, Ping(epoch=old.epoch, seq=1), WORLD)
    redis.lapse()
    begun: list[Lease] = []
    # The next epoch begins once the rank has looked and found nothing to join.
    monkeypatch.setattr("worker.rank.rank.time", SimpleNamespace(sleep=lambda _s: begun.append(redis.lead(WORLD))))
    rank = Rank(redis.another(), redis.blocking(), redis.another(), MODEL, REPLICA, RankWorker(1, WORLD, "cpu"))
    joined = rank._wait_for_epoch(0)
    assert [lease.epoch for lease in begun] == [joined]


def test_its_heartbeat_tells_the_epoch_and_the_last_command(scene: RankScene) -> None:
    """An operator sees from Redis alone that it gets on."""
    scene.ping(1)
    scene.ping(2)

    def beat() -> Any:
        return heartbeats(scene.redis.client, MODEL, REPLICA, WORLD)[1]

    until(lambda: beat() is not None and beat().seq == 2, 40.0)
    assert (beat().epoch, beat().device, beat().oldest_pending_ms) == (scene.lease.epoch, "cpu", 0)


def test_told_to_shut_down_it_says_bye_and_ends(scene: RankScene) -> None:
    """The reply comes first, so that the leader knows; then the process's main function returns."""
    send(scene.redis.client, scene.lease, ShutdownRank(epoch=scene.lease.epoch, seq=1), WORLD)
    assert isinstance(scene.collect(1), Bye)
    scene.thread.join(40)
    assert not scene.thread.is_alive()


def test_a_stranger_is_not_taken_for_it(scene: RankScene) -> None:
    """A reply under another rank's name is dropped, and the real one is waited for."""
    stranger = Pong(epoch=scene.lease.epoch, seq=1, rank=7, world_size=WORLD, cuda_device="cpu")
    reply(scene.redis.client, MODEL, REPLICA, stranger)
    answer = scene.ping(1)
    assert isinstance(answer, Pong) and answer.rank == 1 and scene.replies.stale == 1
