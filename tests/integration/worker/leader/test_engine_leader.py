"""The leader of an external engine loses no token: seen through Redis, whatever kills, stops or breaks the engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from control import requests
from control.messages import (
    Assignment,
    GenerationRequest,
    Grammar,
    Input,
    ModelSpec,
    PoolingAssets,
    ReasoningBudget,
    Sampling,
)
from control.records import catalog
from control.replicas import health
from control.requests import Enqueue
from ops.harness.scripted_engine import Fault, Script, alternatives, server_of, vector_of
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.integration.worker.leader_scene import PROMPT, LeaderScene
from tests.waiting import until
from worker.external.engine import ENGINE_RANK, Address
from worker.leader import engine_sequences as engine_sequences_module
from worker.leader.engine_leader import EngineLeader
from worker.rank import heartbeat as heartbeat_module
from worker.repository.external import external_model

ENGINE = "vllm"
TOKENS = 60


class EngineScene(LeaderScene):
    """A leader in a thread and a scripted engine in another."""

    pooling: PoolingAssets | None = None
    """Of a model that gives vectors."""

    def __init__(self, redis: ReplicaRedis, folder: Path, place: Path, engine: str = ENGINE) -> None:
        self.place, self.script, self.name = place, Script(engine), engine
        self.start_engine()
        super().__init__(redis, folder)

    def start_engine(self) -> None:
        socket = self.place / "e.sock"
        socket.unlink(missing_ok=True)
        self.server = server_of(self.script, uds=str(socket))
        self.serving = threading.Thread(target=self.server.run, daemon=True)
        self.serving.start()

    def stop_engine(self) -> None:
        self.server.force_exit = self.server.should_exit = True
        self.serving.join(20)

    def start(self) -> None:
        self.spec = ModelSpec(name=MODEL, source=str(self.files.folder), engine=self.name)
        catalog.put_spec(self.redis.client, self.spec)
        clients = (self.redis.another(), self.redis.blocking(), self.redis.another())
        assignment = Assignment(spec=self.spec, replica=REPLICA, ranks=[0], devices=["cpu"])
        assert self.files.folder is not None
        pooling = self.pooling
        as_folder = msgspec.structs.replace(self.spec, engine=ENGINE)  # the tests' model is no GGUF file
        model = external_model(self.files.folder, as_folder)
        address = Address(socket=str(self.place / "e.sock"))
        assets = msgspec.structs.replace(model.assets, pooling=pooling)
        self.leader: Any = EngineLeader(clients, assignment, "host/1", model.fingerprint, assets, address)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def expected(self, count: int, prompt: list[int] | None = None) -> list[int]:
        tokens = list(prompt or PROMPT)
        for _ in range(count):
            tokens.append(self.script.next_token(tokens))
        return tokens[-count:]

    def poisons(self) -> list[health.Poison]:
        return self.redis.run(health.poison_history(MODEL, REPLICA))


@pytest.fixture
def scene(redis: ReplicaRedis, folder: Path, tmp_path: Path) -> Iterator[EngineScene]:
    scene = EngineScene(redis, folder, tmp_path)
    yield scene
    scene.stop()
    scene.stop_engine()


class EmbeddingScene(EngineScene):
    pooling = PoolingAssets(kind="embed", dimensions=4)

    def embed(self, rid: str, inputs: list[list[int]], dimensions: int | None = None) -> list[list[float]]:
        """The vectors of a request's inputs, in their order."""
        params = GenerationRequest(
            prompt=[token for tokens in inputs for token in tokens],
            sampling=Sampling(max_tokens=0, n=len(inputs), dimensions=dimensions),
            inputs=[Input(len(tokens)) for tokens in inputs],
        )
        self.redis.run(requests.enqueue(Enqueue(rid=rid, model=MODEL, params=params, tenant="t")))
        self.answer(rid)
        vectors = {entry.choice: entry.vector for entry in self.log(rid)}
        return [np.frombuffer(vectors[choice] or b"", "<f4").tolist() for choice in range(len(inputs))]


@pytest.fixture(params=["vllm", "sglang"])
def embedding_scene(
    request: pytest.FixtureRequest, redis: ReplicaRedis, folder: Path, tmp_path: Path
) -> Iterator[EmbeddingScene]:
    scene = EmbeddingScene(redis, folder, tmp_path, request.param)
    yield scene
    scene.stop()
    scene.stop_engine()


def test_an_engine_gives_a_vector_of_each_input(embedding_scene: EmbeddingScene) -> None:
    inputs = [[5, 6, 7], [9] * 12, [8, 3, 2, 1]]
    assert embedding_scene.embed("a", inputs) == [vector_of(tokens) for tokens in inputs]
    [short] = embedding_scene.embed("b", [[4, 3, 0]], dimensions=2)
    assert short == pytest.approx([3.5 / math.hypot(3.5, 4.0), 4.0 / math.hypot(3.5, 4.0)])


def test_inputs_that_an_engine_loses_are_asked_for_again(embedding_scene: EmbeddingScene) -> None:
    embedding_scene.script.faults.append(Fault("error", times=2))
    assert embedding_scene.embed("a", [[5, 6, 7]]) == [vector_of([5, 6, 7])]


@pytest.fixture(params=["sglang", "llama-server"])
def other_scene(
    request: pytest.FixtureRequest, redis: ReplicaRedis, folder: Path, tmp_path: Path
) -> Iterator[EngineScene]:
    scene = EngineScene(redis, folder, tmp_path, request.param)
    yield scene
    scene.stop()
    scene.stop_engine()


def test_a_request_is_logged_as_the_engine_gives_it(scene: EngineScene) -> None:
    scene.ask("a", max_tokens=TOKENS)
    assert scene.answer("a") == scene.expected(TOKENS)
    assert scene.log("a")[-1].finish == "length"
    assets = catalog.get_assets(scene.redis.client, MODEL)
    assert assets is not None and assets.engine == ENGINE


def test_stop_strings_and_stop_ids_are_judged_by_furrow(scene: EngineScene) -> None:
    tokens = scene.expected(TOKENS)
    scene.ask("a", max_tokens=TOKENS, stop_ids=[tokens[9]])
    assert scene.answer("a") == tokens[: tokens.index(tokens[9]) + 1]
    assert scene.log("a")[-1].cause == "token"
    text = scene.texts("a")[0][0]
    scene.ask("b", max_tokens=TOKENS, stop=[text[3:6]])
    scene.answer("b")
    assert scene.log("b")[-1].cause == text[3:6]


def test_several_choices_are_requests_of_their_own(scene: EngineScene) -> None:
    scene.ask("a", max_tokens=20, n=3)
    scene.answer("a")
    by_choice = {choice: [e.token for e in scene.log("a") if e.choice == choice] for choice in range(3)}
    assert by_choice == dict.fromkeys(range(3), scene.expected(20))
    assert scene.script.requests == 3


def test_an_engine_that_dies_is_awaited_and_no_token_is_lost(scene: EngineScene) -> None:
    scene.script.rate = 40.0
    for name in ("a", "b", "c"):
        scene.ask(name, [*PROMPT, ord(name)], max_tokens=TOKENS)
    scene.under_way("a", 10)
    before = scene.log("a")[:10]
    scene.stop_engine()
    until(lambda: scene.poisons() != [], 20.0)
    assert scene.poisons()[0].rank == ENGINE_RANK
    scene.script.rate = 0.0
    scene.start_engine()
    for name in ("a", "b", "c"):
        assert scene.answer(name) == scene.expected(TOKENS, [*PROMPT, ord(name)])
    assert scene.log("a")[:10] == before


def test_a_leader_that_dies_is_followed_by_one_that_goes_on(scene: EngineScene) -> None:
    scene.script.rate = 100.0
    scene.ask("a", max_tokens=TOKENS)
    scene.under_way("a", 10)
    scene.stop()
    scene.redis.client.delete(scene.redis.keys.lock)
    scene.start()
    assert scene.answer("a") == scene.expected(TOKENS)
    until(lambda: scene.script.running == 0, 20.0)


def test_a_silent_engine_is_blamed(scene: EngineScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_module, "UNKNOWN_STEP_S", 1.0)
    monkeypatch.setattr(heartbeat_module, "STEP_FLOOR_S", 1.0)
    monkeypatch.setattr(heartbeat_module, "PER_TOKEN_S", 0.0)
    scene.script.faults.append(Fault("silence", after=5))
    scene.ask("a", max_tokens=TOKENS)
    until(lambda: scene.poisons() != [], 20.0)
    [poison] = scene.poisons()
    assert (poison.kind, poison.rank) == ("deadline", ENGINE_RANK) and "brought no token" in poison.message
    assert scene.answer("a") == scene.expected(TOKENS), "another epoch goes on"


@pytest.mark.parametrize("kind", ["half", "abort", "error"])
def test_a_piece_that_fails_is_continued(scene: EngineScene, kind: str) -> None:
    scene.script.faults.append(Fault(kind, after=0 if kind == "error" else 7))  # type: ignore[arg-type]
    scene.ask("a", max_tokens=TOKENS)
    assert scene.answer("a") == scene.expected(TOKENS)
    assert scene.poisons() == []


@pytest.mark.parametrize("kind", ["repeat", "half", "error"])
def test_the_other_engines_lose_and_repeat_no_token(other_scene: EngineScene, kind: str) -> None:
    scene = other_scene
    scene.script.faults.append(Fault(kind, after=0 if kind == "error" else 7))  # type: ignore[arg-type]
    scene.ask("a", max_tokens=TOKENS)
    assert scene.answer("a") == scene.expected(TOKENS)


def test_the_log_has_what_the_other_engines_say_of_their_tokens(other_scene: EngineScene) -> None:
    """Log probabilities of each token, and the tokens of the prompt that were in the engine's cache."""
    other_scene.ask("a", max_tokens=20, logprobs=2)
    tokens = other_scene.answer("a")
    entries = [entry for entry in other_scene.log("a") if entry.token is not None]
    rows = [entry.logprobs for entry in entries]
    assert [row and row.top for row in rows] == [alternatives(token, 2) for token in tokens]
    assert entries[0].cached == len(PROMPT) // 2 and not any(entry.cached for entry in entries[1:])


def test_a_request_that_the_engine_refuses_fails_alone_with_its_words(scene: EngineScene) -> None:
    scene.script.faults.append(Fault("refuse"))
    scene.ask("a", max_tokens=TOKENS)
    assert scene.answer("a") == [None]
    assert scene.log("a")[-1].finish == "error" and "on order" in str(scene.log("a")[-1].cause)
    scene.ask("b", max_tokens=TOKENS)
    assert scene.answer("b") == scene.expected(TOKENS)


def test_a_piece_that_always_fails_ends_its_request(scene: EngineScene) -> None:
    scene.script.faults.append(Fault("error", times=engine_sequences_module.TRIES))
    scene.ask("a", max_tokens=TOKENS)
    scene.answer("a")
    assert scene.log("a")[-1].finish == "error"


def test_a_cancelled_request_ends_at_the_engine(scene: EngineScene) -> None:
    scene.script.rate = 50.0
    scene.ask("a", max_tokens=300)
    scene.under_way("a", 5)
    scene.redis.run(requests.cancel(MODEL, "a", "t"))
    until(lambda: scene.state("a") == "cancelled", 20.0)
    until(lambda: scene.script.running == 0, 20.0)


def test_an_answer_with_a_grammar_is_logged_when_it_is_whole(scene: EngineScene) -> None:
    scene.script.rate = 30.0
    scene.ask("a", max_tokens=40, grammar=Grammar("json_object"))
    until(lambda: scene.script.running == 1, 20.0)
    assert scene.log("a") == []
    scene.script.faults.append(Fault("half", after=20))
    assert scene.answer("a") == scene.expected(40)


def test_a_budget_of_reasoning_forces_its_end(scene: EngineScene) -> None:
    closing = [11, 12]
    budget = ReasoningBudget(tokens=8, open="<o>", close="<c>", closing=closing, opening=[9], begun=True)
    scene.ask("a", max_tokens=30, reasoning=budget)
    tokens = scene.answer("a")
    assert tokens[8:10] == closing
    assert tokens[:8] == scene.expected(8)
    assert tokens[10:] == scene.expected(20, [*PROMPT, *tokens[:10]])  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["vllm", "llama-server"])
def test_penalties_count_the_whole_answer_after_a_recovery(
    redis: ReplicaRedis, folder: Path, tmp_path: Path, name: str
) -> None:
    """An engine counts its own output, or the prompt too: Furrow then counts, and asks for one token at a time."""
    scene = EngineScene(redis, folder, tmp_path, name)
    try:
        scene.ask("a", max_tokens=12, presence_penalty=0.5, frequency_penalty=1.0)
        assert scene.answer("a") == scene.expected(12)
        first = list(scene.script.bodies)
        if name == "vllm":
            assert len(first) == 1 and first[0]["frequency_penalty"] == 1.0
            scene.script.faults.append(Fault("half", after=5))
            scene.ask("b", max_tokens=12, presence_penalty=0.5, frequency_penalty=1.0)
            assert scene.answer("b") == scene.expected(12)
            first = list(scene.script.bodies)[2:]
        last = first[-1]
        assert last.get("max_tokens", last.get("n_predict")) == 1
        assert last.get("frequency_penalty", 0.0) == 0.0
        bias = dict(last["logit_bias"]) if name == "llama-server" else last["logit_bias"]
        tokens = scene.expected(11)
        assert {int(token): value for token, value in bias.items()} == {
            token: pytest.approx(-0.5 - tokens.count(token)) for token in set(tokens)
        }
    finally:
        scene.stop()
        scene.stop_engine()


def test_a_long_answer_that_comes_as_a_whole_is_no_hang(
    redis: ReplicaRedis, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-server brings an answer with a grammar in one piece."""
    monkeypatch.setattr(heartbeat_module, "UNKNOWN_STEP_S", 0.5)
    monkeypatch.setattr(heartbeat_module, "STEP_FLOOR_S", 0.5)
    monkeypatch.setattr(heartbeat_module, "PER_TOKEN_S", 0.0)
    scene = EngineScene(redis, folder, tmp_path, "llama-server")
    try:
        scene.script.rate = 20.0
        scene.ask("a", max_tokens=40, grammar=Grammar("json_object"))
        assert scene.answer("a")[:40] == scene.expected(40)
        assert scene.poisons() == []
    finally:
        scene.stop()
        scene.stop_engine()
