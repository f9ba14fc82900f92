"""The scripted leader of tests acts like a real one: it leaves in Redis what the real leader leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from control import requests
from control.messages import GenerationRequest, LogEntry, Sampling
from control.requests import Enqueue
from tests.integration.worker.conftest import MODEL, ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.leader import ScriptedLeader
from tests.models import make
from tests.waiting import until
from worker.repository.assets import read_assets

LONG = 10_000
"""Tokens that no leader produces before the request is cancelled or expires."""


@dataclass(frozen=True)
class Case:
    """A request. `stop_after` makes its third greedy token a stop: an id or a string."""

    sampling: dict[str, Any]
    prompt: list[int] = field(default_factory=lambda: [10, 20, 30, 40])
    stop_after: str = ""
    deadline_ms: int = 0
    cancelled: bool = False
    repeated: bool = False
    """True if the same prompt was answered before, and is cached."""

    @property
    def interrupted(self) -> bool:
        return self.cancelled or self.deadline_ms > 0


CASES = {
    "length": Case({"max_tokens": 5}),
    "one-token": Case({"max_tokens": 1}),
    "two-choices": Case({"max_tokens": 4, "n": 2}),
    "a-stop-id": Case({"max_tokens": 8}, stop_after="id"),
    "a-stop-id-before-min_tokens": Case({"max_tokens": 8, "min_tokens": 8}, stop_after="id"),
    "a-stop-string": Case({"max_tokens": 8}, stop_after="string"),
    "logprobs": Case({"max_tokens": 3, "logprobs": 2}),
    "the-prompts-scores-alone": Case({"max_tokens": 0, "prompt_logprobs": 1}),
    "the-prompts-scores-and-tokens": Case({"max_tokens": 2, "prompt_logprobs": 1, "n": 2}),
    "a-cached-prompt": Case({"max_tokens": 2}, prompt=list(range(3, 103)), repeated=True),
    "a-cancel": Case({"max_tokens": LONG}, cancelled=True),
    "a-cancel-of-two-choices": Case({"max_tokens": LONG, "n": 2}, cancelled=True),
    "a-deadline": Case({"max_tokens": LONG}, deadline_ms=1500),
}


class Farm:
    """One Redis, with the real leader first and the scripted one after it."""

    def __init__(self, redis: ReplicaRedis, folder: Path) -> None:
        self.redis = redis
        self.scene = LeaderScene(redis, folder, kv_tokens=3 * LONG)
        self.assets = read_assets(self.scene.files, None)
        self.tokenizer = Tokenizer.from_str(self.assets.tokenizer_json)

    def ask(self, rid: str, case: Case, greedy: list[int]) -> None:
        stop: dict[str, Any] = {}
        if case.stop_after == "id":
            stop = {"stop_ids": [greedy[2]]}
        elif case.stop_after == "string":
            stop = {"stop": [self.tokenizer.decode(greedy[:3])]}
        sampling = Sampling(**({"temperature": 0.0} | case.sampling | stop))
        params = GenerationRequest(prompt=case.prompt, sampling=sampling)
        self.redis.run(
            requests.enqueue(
                Enqueue(
                    rid=rid,
                    model=MODEL,
                    params=params,
                    tenant="t",
                    account="key",
                    hold=f"hold-{rid}",
                    deadline_ms=case.deadline_ms,
                )
            )
        )

    def run(self, rid: str, case: Case, greedy: list[int]) -> None:
        """Let a leader answer the request."""
        self.ask(rid, case, greedy)
        if case.cancelled:
            until(lambda: len(self.scene.log(rid)) >= 4, 40.0)
            self.redis.run(requests.cancel(MODEL, rid, "t"))
        until(lambda: self.scene.state(rid) not in ("queued", "running"), 40.0)

    def left(self, rid: str, case: Case) -> dict[str, Any]:
        """The remains of a request in Redis: log, hash and settlement."""
        log = self.scene.log(rid)
        assert [entry.seq for entry in log] == list(range(1, len(log) + 1))
        hash_fields = self.redis.client.hgetall(self.scene.keys.request(rid))
        tokens = sum(entry.token is not None for entry in log)
        [settled] = [
            fields
            for _, fields in self.redis.client.xrange(f"{self.scene.keys.base}settlements")
            if fields["rid"] == rid and fields["ended"] == "1"
        ]
        return {
            "entries": told(log, ends_only=case.interrupted),
            "fields": frozenset(hash_fields),
            "state": hash_fields["state"],
            "cached": hash_fields.get("cached_tokens"),
            "settled": (settled["key"], int(settled["tokens"]) - tokens),
        }


def told(log: list[LogEntry], ends_only: bool) -> list[Any]:
    """The entries without numbers that come from a model's logits. Scores of a prompt come in pieces of any size."""
    entries: list[Any] = []
    scores: dict[int, list[Any]] = {}
    for entry in log:
        if entry.prompt:
            pieces = scores.setdefault(entry.choice, [])
            pieces += [(one.token, one.logprob is None, len(one.top or [])) for one in entry.prompt]
        elif entry.finish or not ends_only:
            logprobs = None if entry.logprobs is None else len(entry.logprobs.top)
            entries.append((entry.choice, entry.token, entry.finish, entry.cause, logprobs, entry.cached))
    return [*sorted(scores.items()), *entries]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def farm(redis: ReplicaRedis, folder: Path) -> Iterator[Farm]:
    yield Farm(redis, folder)


@pytest.mark.timeout(180)
def test_it_leaves_in_redis_what_the_real_leader_leaves(farm: Farm) -> None:
    """Entries with their ends and causes, the fields of the request's hash, the settlement of its key."""
    scene, real = farm.scene, dict[str, dict[str, Any]]()
    try:
        scene.ask("greedy", max_tokens=8)
        greedy = [token for token in scene.answer("greedy") if token is not None]
        for name, case in CASES.items():
            if case.repeated:
                farm.run(f"first-{name}", case, greedy)
            farm.run(f"real-{name}", case, greedy)
            real[name] = farm.left(f"real-{name}", case)
    finally:
        scene.stop()
    leader = ScriptedLeader(farm.redis.url, MODEL, farm.assets)
    leader.start()
    try:
        for name, case in CASES.items():
            said = [entry.token for entry in scene.log(f"real-{name}") if entry.choice == 0 and entry.token is not None]
            leader.script = lambda params, said=said: said or [0]
            leader.cached = int(real[name]["cached"] or 0)
            if case.interrupted:
                leader.pause()
                leader.step(4)
            farm.run(f"scripted-{name}", case, greedy)
            leader.resume()
            found = farm.left(f"scripted-{name}", case)
            assert found.pop("fields") ^ real[name].pop("fields") == set(), name
            assert {key: (found[key], left) for key, left in real[name].items() if found[key] != left} == {}, name
    finally:
        leader.stop()
    assert int(real["a-cached-prompt"]["cached"]) >= 64
