"""Replayed requests have the same logits: under other circumstances, the same tokens from the same bits."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from control.messages import GenerationRequest, LogEntry, Sampling
from control.requests.upkeep.replay import KeptRequest, differences, find_kept, replay
from ops.cli.requests import compare
from ops.cli.requests import replay as command
from tests.integration.worker.conftest import MODEL, ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.models import make
from worker.engine.step import Forward
from worker.leader import group_leader as leader_module
from worker.leader.group_leader import LeaderLimits
from worker.native.library import load_library
from worker.sampling.sampler import PendingTokens, StepSampler
from worker.scheduling.sequence import Sequence

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")

REQUESTS = 24
HOUR_MS = 3_600_000
Hashes = dict[tuple[str, int, int], int]
"""crc32 of the logits of each token, by seed, choice and position."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("qwen3"), max_position_embeddings=2048)


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> Hashes:
    """A token's logits may be computed after a wrong guess and then again: the last ones count."""
    found: Hashes = {}
    begin = StepSampler.begin

    def watched(self: StepSampler, rows: list[Sequence], forward: Forward) -> PendingTokens:
        for row, logits in zip(rows, forward.logits, strict=True):
            found[row.sampling.seed, row.choice, row.position] = zlib.crc32(np.asarray(logits).tobytes())
        return begin(self, rows, forward)

    monkeypatch.setattr(StepSampler, "begin", watched)
    return found


@pytest.fixture
def scene(redis: ReplicaRedis, folder: Path) -> Iterator[LeaderScene]:
    scene = LeaderScene(redis, folder, kv_tokens=6000, dtype="float32")
    yield scene
    scene.stop()


def restart(scene: LeaderScene, **changes: Any) -> None:
    scene.spec = msgspec.structs.replace(scene.spec, **changes)
    scene.start()


def ask_all(scene: LeaderScene) -> list[str]:
    """Requests of every kind of sampling that begin with each other's prompts."""
    draw = random.Random(0)
    for index in range(REQUESTS):
        prompt = [number * 5 % 120 + 3 for number in range(draw.choice([5, 70, 150]))]
        sampling = draw.choice([{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "n": 2}])
        more = {"max_tokens": draw.randrange(5, 40), "seed": str(index), "logprobs": draw.choice([None, 2])}
        scene.ask(f"r{index}", prompt, keep_ms=HOUR_MS, **(sampling | more))
    return [f"r{index}" for index in range(REQUESTS)]


def test_kept_requests_come_again_to_the_bit(
    scene: LeaderScene, hashes: Hashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other chunks, other threads, another number of guesses, no prefix cache, and in another order and company."""
    rids = ask_all(scene)
    for rid in rids:
        scene.answer(rid)
    first = dict(hashes)
    assert len(first) > 10 * REQUESTS
    hashes.clear()
    scene.stop()
    monkeypatch.setattr(leader_module, "LeaderLimits", lambda: LeaderLimits(token_budget=13))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    restart(scene, lookup=0, prefix_cache=False)
    client = scene.redis.client
    for rid in reversed(rids):
        replay(client, find_kept(client, [MODEL], rid), f"again-{rid}")
    for rid in rids:
        scene.answer(f"again-{rid}")
        record = find_kept(client, [MODEL], rid)
        assert differences(record, scene.log(f"again-{rid}")) == []
    assert hashes == first


def test_the_command_says_what_differs(scene: LeaderScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 0 and a count, or exit 1 and the first token that differs, here of a log that was changed by hand."""
    scene.ask("kept", keep_ms=HOUR_MS, max_tokens=12, seed="1")
    answered = scene.answer("kept")
    monkeypatch.setattr("ops.cli.requests.connect_to_farm", lambda url: scene.redis.client)
    result = CliRunner().invoke(command, ["chatcmpl-kept", "--times", "2"])
    lines = [line for line in result.output.splitlines() if "action=" not in line]  # the leader logs to it as well
    assert (result.exit_code, lines) == (0, ["The same 12 tokens in 1 choices."] * 2)
    log = scene.keys.log("kept")
    entry = scene.log("kept")[-1]
    scene.redis.client.xdel(log, "12-0")
    changed = msgspec.structs.replace(entry, token=(answered[-1] or 0) + 1)
    scene.redis.client.xadd(log, {"e": msgspec.json.encode(changed).decode()}, id="12-1")
    result = CliRunner().invoke(command, ["kept"])
    assert result.exit_code == 1
    assert "Another backend" not in result.output
    assert result.output.startswith(
        f"choice 0 differs at entry 11: token {(answered[-1] or 0) + 1}, length then, token "
    )


def test_another_backend_is_named() -> None:
    """By both fingerprints; tokens may be the same all the same."""
    then = [LogEntry(1, 0, 5, fingerprint="fp_a"), LogEntry(2, 0, 6, "length")]
    record = KeptRequest("m", "a", GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=2)), then)
    now = [msgspec.structs.replace(then[0], fingerprint="fp_b"), then[1]]
    assert [compare(record, entries)[1] for entries in (now, then)] == [
        ["Another backend: fp_a then, fp_b now. The bits may differ.", "The same 2 tokens in 1 choices."],
        ["The same 2 tokens in 1 choices."],
    ]
