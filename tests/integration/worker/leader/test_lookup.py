"""Lookup saves forwards and changes no answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control.messages import Grammar, ReasoningBudget
from tests.integration.worker.conftest import ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.models import make
from worker.native.library import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")

PERIOD = [10, 20, 30, 40, 50, 60, 70]
PROMPT = PERIOD * 5
CLOSING = [ord(letter) for letter in "</think>"]
LIST = Grammar("regex", r'(\{"name": "[a-c]{2}", "known": true\} ?){12}')
FEW = {"logit_bias": {11: 60.0, 12: 60.0, 13: 60.0}}
"""Hardly another token is drawn, so that sequences of three repeat, and guesses are sometimes right."""
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "greedy": FEW,
    "drawn": FEW | {"temperature": 1.0, "seed": "5", "n": 2},
    "top": FEW | {"temperature": 1.5, "seed": "6", "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "penalised": FEW | {"temperature": 1.0, "seed": "7", "repetition_penalty": 1.01, "presence_penalty": 0.1},
    "scored": FEW | {"logprobs": 3},
    "words": FEW | {"temperature": 1.0, "seed": "9", "bad_words": [[11, 11], [12, 13, 12]]},
    "grammar": {"grammar": LIST, "temperature": 0.8, "seed": "8", "max_tokens": 500},
    "reasoning": FEW
    | {
        "reasoning": ReasoningBudget(
            tokens=30, open="<think>", close="</think>", opening=CLOSING[:1], closing=CLOSING, begun=True
        )
    },
    "short": FEW | {"max_tokens": 3},
    "stop": FEW | {"stop": [3 * chr(12), 3 * chr(11)], "min_tokens": 20, "temperature": 1.0, "seed": "10"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    family = getattr(request, "param", "llama")
    return make(family, tmp_path_factory.mktemp(family), max_position_embeddings=2048)


@pytest.fixture
def scene(redis: ReplicaRedis, folder: Path) -> Iterator[LeaderScene]:
    scene = LeaderScene(redis, folder, kv_tokens=20000, dtype="float32")
    yield scene
    scene.stop()


def forwards(scene: LeaderScene) -> int:
    """Forwards that the rank has run; progress of other kinds is slower than tokens here."""
    engine = scene.leader._rank_worker._engine
    return engine.forwards if engine is not None else 0


def ask(scene: LeaderScene, rid: str, kind: str, **more: Any) -> None:
    scene.ask(rid, PROMPT, cache_salt=rid, **({"max_tokens": 120} | KINDS[kind] | more))


def entries(scene: LeaderScene, rid: str) -> list[tuple[Any, ...]]:
    """The log by choice, without the numbers of its entries."""
    scene.answer(rid)
    log = sorted(scene.log(rid), key=lambda entry: (entry.choice, entry.seq))
    return [(entry.choice, entry.token, entry.finish, entry.cause, entry.logprobs) for entry in log]


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_change_no_answer(scene: LeaderScene, kind: str) -> None:
    """Tokens, ends and log probabilities are the same to the bit, alone."""
    ask(scene, "plain", kind, lookup=0)
    plain, before = entries(scene, "plain"), forwards(scene)
    ask(scene, "guessed", kind)
    assert entries(scene, "guessed") == plain
    taken, tokens = forwards(scene) - before, max(sum(entry[0] == choice for entry in plain) for choice in (0, 1))
    assert taken <= 1.02 * tokens
    if kind in ("greedy", "scored", "words", "grammar", "reasoning"):
        assert taken < 0.95 * tokens, "no guess was right"


@pytest.mark.parametrize("folder", ["llama", "qwen3_5_text"], indirect=True)
def test_guesses_beside_others_and_over_an_epoch(scene: LeaderScene) -> None:
    """All kinds at once, with and without guesses, while a leader loses its lock: each answer is that of its twin."""
    for kind in KINDS:
        ask(scene, f"{kind}-plain", kind, lookup=0)
        ask(scene, f"{kind}-guessed", kind)
        ask(scene, f"{kind}-two", kind, lookup=2)
    scene.under_way("greedy-guessed")
    scene.redis.lapse()
    for kind in KINDS:
        plain = entries(scene, f"{kind}-plain")
        assert entries(scene, f"{kind}-guessed") == plain and entries(scene, f"{kind}-two") == plain
    assert scene.epoch() > 1
    before = forwards(scene)
    ask(scene, "later", "greedy")
    tokens = len(entries(scene, "later"))
    assert forwards(scene) - before < 0.95 * tokens, "no guess was right"


def test_a_prediction_is_verified_counted_and_changes_no_answer(scene: LeaderScene) -> None:
    """Text of which nothing repeats: where it is predicted but for an edit, it takes a fraction of the forwards. The
    count in the log is that of the answer alone, before and after a new epoch."""
    ask(scene, "plain", "free", lookup=0)
    plain = entries(scene, "plain")
    tokens = [entry[1] for entry in plain]
    predicted = [*tokens[:50], 250, 251, 252, *tokens[51:]]
    before = forwards(scene)
    ask(scene, "predicted", "free", prediction=predicted)
    assert entries(scene, "predicted") == plain and forwards(scene) - before < len(tokens) / 2
    end = tokens[len(tokens) // 2 :]  # until there each token takes a forward, so that an epoch can end before
    ask(scene, "end", "free", prediction=end)
    assert entries(scene, "end") == plain
    ask(scene, "off", "free", prediction=predicted, lookup=0)
    ask(scene, "wrong", "free", prediction=[250, 251] * 300)
    ask(scene, "over", "free", prediction=end)
    scene.under_way("over")
    scene.redis.lapse()
    for rid in ("off", "wrong", "over"):
        assert entries(scene, rid) == plain
    assert scene.epoch() > 1
    counts = {rid: scene.log(rid)[-1].predicted for rid in ("plain", "predicted", "off", "end", "over", "wrong")}
    expected = {"plain": None, "wrong": 0, "end": len(end), "over": len(end)}
    assert counts == expected | dict.fromkeys(("predicted", "off"), len(tokens) - 1)
