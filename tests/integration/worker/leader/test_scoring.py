"""Prompts' log probabilities are told once: those of transformers, whatever happens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from control.messages import LogEntry, PromptToken
from tests.integration.worker.conftest import ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.models import make
from worker.engine import scoring as scoring_module
from worker.engine.step import Step
from worker.leader import group_leader as leader_module
from worker.leader.group_leader import LeaderLimits
from worker.native.library import Threads

BUDGET = 32
PROMPT = [(7 * number) % 120 for number in range(200)]
TOP = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def logarithms(folder: Path) -> torch.Tensor:
    """transformers' log probabilities after each token of the prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)


@pytest.fixture
def scene(redis: ReplicaRedis, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LeaderScene]:
    """Long prompts take several steps."""
    monkeypatch.setattr(leader_module, "LeaderLimits", lambda: LeaderLimits(token_budget=BUDGET))
    scene = LeaderScene(redis, folder, kv_tokens=2000)
    yield scene
    scene.stop()


def told(log: list[LogEntry], choice: int = 0) -> list[PromptToken]:
    return [token for entry in log if entry.choice == choice for token in entry.prompt or []]


def assert_right(tokens: list[PromptToken], logarithms: torch.Tensor, prompt: list[int] = PROMPT) -> None:
    assert [token.token for token in tokens] == prompt
    assert tokens[0] == PromptToken(prompt[0])
    for row, token in zip(logarithms, tokens[1:], strict=False):
        assert token.logprob == pytest.approx(float(row[token.token]), abs=2e-6)
        assert token.rank == 1 + int((row > row[token.token]).sum())
        best = row.topk(TOP)
        assert [one for one, _ in token.top] == best.indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=2e-6)


def test_scores_are_those_of_transformers(scene: LeaderScene, logarithms: torch.Tensor) -> None:
    """Over several steps, for each choice, behind a prompt that is cached already, and before its first token."""
    scene.ask("before", PROMPT, max_tokens=4)
    plain = scene.answer("before")
    scene.ask("scored", PROMPT, max_tokens=4, prompt_logprobs=TOP, n=2)
    scene.answer("scored")
    log = scene.log("scored")
    for choice in range(2):
        its = [entry for entry in log if entry.choice == choice]
        assert_right(told(log, choice), logarithms)
        assert [entry.token for entry in its if not entry.prompt] == plain
        assert [bool(entry.prompt) for entry in its] == [True] * (len(its) - 4) + [False] * 4
        assert max(len(entry.prompt or []) for entry in its) <= BUDGET + 1
    scene.ask("after", PROMPT, max_tokens=4)
    assert scene.answer("after") == plain
    assert scene.log("after")[0].cached == len(PROMPT) - 1


@pytest.mark.parametrize("length", [1, 2, BUDGET, BUDGET + 1, len(PROMPT)])
def test_a_prompt_is_scored_without_an_answer(scene: LeaderScene, logarithms: torch.Tensor, length: int) -> None:
    """With no token wanted the prompt is told, however long, and the end says so."""
    scene.ask("r", PROMPT[:length], max_tokens=0, prompt_logprobs=TOP)
    assert all(token is None for token in scene.answer("r"))
    log = scene.log("r")
    assert_right(told(log), logarithms, PROMPT[:length])
    assert [entry.finish for entry in log] == [None] * (len(log) - 1) + ["length"]


def test_a_recovery_repeats_nothing(
    scene: LeaderScene, logarithms: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that the log has at the group's end are not sent again; the others are."""
    real, steps = Step.forward, 0

    def forward(step: Step, *how: Any) -> Any:
        nonlocal steps
        steps += any(row.scored for row in step.command.change.rows)
        if steps == 4:
            steps += 1
            raise MemoryError("once")
        return real(step, *how)

    monkeypatch.setattr(Step, "forward", forward)
    scene.ask("r", PROMPT, max_tokens=2, prompt_logprobs=TOP)
    tokens = [token for token in scene.answer("r") if token is not None]
    assert scene.epoch() and len(tokens) == 2
    assert_right(told(scene.log("r")), logarithms)
    assert steps > len(PROMPT) // BUDGET, "all was computed again, of which only the rest was wanted"


def _raises(*_: Any) -> Any:
    raise ValueError("no")


def _sick(logits: Any, targets: list[int], most: int, threads: Threads | None) -> list[PromptToken | None]:
    return [None] * len(targets)


@pytest.mark.parametrize("score", [_raises, _sick])
def test_a_failure_is_its_own(scene: LeaderScene, score: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that can't be scored ends with an error; who is beside it goes on."""
    monkeypatch.setattr(scoring_module, "score", score)
    scene.ask("beside", max_tokens=30)
    scene.ask("r", PROMPT, max_tokens=2, prompt_logprobs=TOP)
    scene.answer("r")
    assert len(scene.answer("beside")) == 30
    [last] = scene.log("r")
    assert last.finish == "error" and last.cause


def test_logarithms_are_no_constants(logarithms: torch.Tensor) -> None:
    """The tiny model says something: its log probabilities differ from place to place."""
    assert len({round(float(row[5]), 3) for row in logarithms}) > 100
    assert all(math.isfinite(float(row.sum())) for row in logarithms)
