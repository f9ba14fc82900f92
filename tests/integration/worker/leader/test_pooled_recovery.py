"""Embedding inputs outlive their epoch: what was told stays, and the rest is computed again, to equal vectors."""

from __future__ import annotations

from pathlib import Path

import torch

from control import requests
from control.keys import ModelKeys
from control.messages import GenerationRequest, Input, LogEntry, Sampling
from control.replicas.health import read_epoch, write_poison
from control.requests import Enqueue
from control.requests.token_log import read_pages
from tests import pooled_models
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.waiting import until

REQUESTS, INPUTS, TOKENS = 40, 12, 100


def ask(redis: ReplicaRedis, rid: str, first: int) -> None:
    """A request for the vectors of INPUTS inputs."""
    inputs = [[(first + 7 * index + place) % 128 for place in range(TOKENS)] for index in range(INPUTS)]
    params = GenerationRequest(
        prompt=[token for one in inputs for token in one],
        sampling=Sampling(max_tokens=0, temperature=0.0, seed="0", n=INPUTS),
        inputs=[Input(TOKENS)] * INPUTS,
    )
    redis.run(requests.enqueue(Enqueue(rid=rid, model=MODEL, params=params, tenant="t")))


def entries(redis: ReplicaRedis, rid: str) -> list[LogEntry]:
    return [entry for page in read_pages(redis.client, MODEL, rid) for entry in page]


def vectors(redis: ReplicaRedis, rid: str) -> list[bytes | None]:
    """The vectors of a request by input, once it has ended; each was told once."""
    key = ModelKeys(MODEL).request(rid)
    until(lambda: redis.client.hget(key, "state") == "finished", 60)
    told = entries(redis, rid)
    assert sorted(entry.choice for entry in told) == list(range(INPUTS))
    assert all(entry.finish == "stop" and entry.token is None for entry in told)
    return [entry.vector for entry in sorted(told, key=lambda entry: entry.choice)]


def near(some: list[bytes | None], others: list[bytes | None]) -> bool:
    """True if the vectors are equal to the precision of float32: a batch of other rows may round otherwise."""
    return all(
        one is not None and other is not None and torch.allclose(numbers(one), numbers(other), atol=1e-6)
        for one, other in zip(some, others, strict=True)
    )


def numbers(vector: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(vector), dtype=torch.float32)


def test_a_new_epoch_computes_what_was_not_told(redis: ReplicaRedis, tmp_path: Path) -> None:
    """Each input has one vector, which is that of a run without a failure."""
    scene = LeaderScene(redis, pooled_models.make("bert", tmp_path), kv_tokens=4096)
    names = [f"a{index}" for index in range(REQUESTS)]
    for index, rid in enumerate(names):
        ask(redis, rid, index)
    until(lambda: entries(redis, names[1]), 40)
    epoch = read_epoch(redis.client, MODEL, REPLICA)
    write_poison(redis.client, MODEL, REPLICA, epoch, 0, "exited", "a rank was killed")
    state = redis.client.hget(ModelKeys(MODEL).request(names[-1]), "state")
    assert state in ("queued", "running"), "the epoch must end before the work does"
    disturbed = [vectors(redis, rid) for rid in names]
    assert read_epoch(redis.client, MODEL, REPLICA) > epoch
    for index in (0, 1, 2, REQUESTS - 1):
        ask(redis, f"b{index}", index)
        assert near(vectors(redis, f"b{index}"), disturbed[index])
    scene.stop()
