"""The state of a host's replicas, on a real server."""

from __future__ import annotations

from control.messages import Assignment, ModelSpec
from control.placement import farm
from control.replicas.health import Beat, beat, write_poison, write_status
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from worker.agent.host_replicas import read_host

HOST = "host"


def given(replica: str) -> Assignment:
    return Assignment(spec=ModelSpec(name=MODEL, source="/m", tp=1), replica=replica, ranks=[0], devices=["cpu"])


def reads(redis: ReplicaRedis) -> int:
    """How often the server has read from a connection."""
    return redis.client.info("stats")["total_reads_processed"]


def test_a_look_has_the_epoch_the_poison_the_status_and_the_beats(redis: ReplicaRedis) -> None:
    lease = redis.lead(2)
    word = Beat(
        epoch=lease.epoch,
        seq=7,
        oldest_pending_ms=0,
        device="cpu",
        memory_bytes=0,
        phase="ready",
        pid=11,
        host=HOST,
    )
    redis.run(beat(MODEL, REPLICA, 1, word))
    write_poison(redis.client, MODEL, REPLICA, lease.epoch, 0, "exited", "because")
    write_status(redis.client, MODEL, REPLICA, "backoff", "waits")
    look = read_host(redis.client, HOST, {(MODEL, REPLICA): 2})[1].looks[MODEL, REPLICA]
    assert look.epoch == lease.epoch and look.beats == [None, word]
    assert look.poison is not None and look.poison.message == "because"
    assert look.status is not None and look.status.state == "backoff"


def test_any_number_of_replicas_is_read_in_one_round_trip(redis: ReplicaRedis) -> None:
    """A round trip costs the server more than the commands in it, and every agent makes them five times a second."""
    names = [f"r{index}" for index in range(40)]
    for name in names:
        farm.assign(redis.client, HOST, given(name))
    before = reads(redis)
    _, view = read_host(redis.client, HOST, {(MODEL, name): 1 for name in names})
    assert reads(redis) - before < 10, "the server reads a long pipeline in a few parts, and the count is one of them"
    assert view.assignments.keys() == view.looks.keys() == {(MODEL, name) for name in names}
    assert all(look.beats == [None] and look.status is None for look in view.looks.values())
