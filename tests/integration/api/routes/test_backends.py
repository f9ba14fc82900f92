"""`system_fingerprint` and the backends in GET /v1/models: as the official client reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from control.records import catalog
from control.records.backend import Backend, put_backend
from control.redis.connection import run
from tests.leader import ScriptedLeader
from tests.waiting import until

BACKEND = Backend(
    weights="aa",
    dtype="float32",
    quant="int8",
    dequantize=False,
    tp=1,
    collective="",
    kernels=["C++ 1"],
    batch_invariant=True,
)


@pytest.fixture
def replicas(redis_client: Any) -> Iterator[Any]:
    """Sets the backends of replicas by name, which are gone afterwards."""
    named: set[str] = set()

    def set_all(**backends: Backend | None) -> None:
        for replica, backend in backends.items():
            named.add(replica)
            run(redis_client, catalog.put_replica("tiny", replica, catalog.Assigned(revision=1, tp=1)))
            run(redis_client, put_backend("tiny", replica, backend))

    yield set_all
    for replica in named:
        catalog.retire(redis_client, "tiny", replica)
        run(redis_client, put_backend("tiny", replica, None))


def test_answers_name_the_backend(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Bodies and every chunk, in chat and completions; without one the field is absent."""
    for fingerprint in ("fp_a", None):
        leader.fingerprint = fingerprint
        chat: Any = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        plain: Any = {"model": "tiny", "prompt": "x"}
        assert client.chat.completions.create(**chat).system_fingerprint == fingerprint
        assert client.completions.create(**plain).system_fingerprint == fingerprint
        usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
        for chunks in (client.chat.completions.create(**chat, **usage), client.completions.create(**plain, **usage)):
            assert {chunk.system_fingerprint for chunk in chunks} == {fingerprint}


def test_models_have_the_backends_of_their_replicas(
    client: openai.OpenAI, leader: ScriptedLeader, replicas: Any
) -> None:
    """One fingerprint where all replicas agree, null and every backend where they differ, an empty list before."""

    def told() -> tuple[Any, list[Any]]:
        card: Any = client.models.retrieve("tiny")
        return card.system_fingerprint, [(one["system_fingerprint"], one["replicas"]) for one in card.backends]

    until(lambda: told() == (None, []), 5)
    replicas(r0=BACKEND, r1=BACKEND)
    until(lambda: told() == (BACKEND.fingerprint, [(BACKEND.fingerprint, 2)]), 5)
    [backend] = client.models.retrieve("tiny").backends  # type: ignore[attr-defined]
    assert (backend["weights"], backend["quant"], backend["tp"], backend["kernels"]) == ("aa", "int8", 1, ["C++ 1"])
    other = msgspec.structs.replace(BACKEND, kernels=["C++ 2"])
    replicas(r1=other, r2=BACKEND)
    until(lambda: told() == (None, [(BACKEND.fingerprint, 2), (other.fingerprint, 1)]), 5)
