"""Constrained answers are valid: to the last one, next to others, over crashes and preemptions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control.messages import Grammar, ReasoningBudget
from tests.integration.worker.conftest import ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.models import EOS
from tests.waiting import until
from worker.scheduling.scheduler import Scheduler

SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
            },
            "required": ["name", "age", "tags"],
            "additionalProperties": False,
        }
    ),
)
ENOUGH = 400
"""Tokens that the longest text of the schema fits into, white space included."""


@pytest.fixture
def scene(redis: ReplicaRedis, folder: Path) -> Iterator[LeaderScene]:
    scene = LeaderScene(redis, folder, kv_tokens=20000)
    yield scene
    scene.stop()


def is_person(text: str) -> bool:
    person: dict[str, Any] = json.loads(text)
    return (
        list(person) == ["name", "age", "tags"]
        and len(person["name"]) <= 6
        and 0 <= person["age"] <= 150
        and set(person["tags"]) <= {"red", "green"}
        and len(person["tags"]) <= 3
    )


def test_every_answer_of_a_random_model_is_valid_and_no_neighbour_is_changed(scene: LeaderScene) -> None:
    """Thirty-two at once, half of them free: each constrained one parses, each free one is what it is when alone."""
    free = {f"free{i}": {"temperature": i % 2 * 1.0, "seed": str(i), "max_tokens": 24} for i in range(16)}
    scene.ask("alone", **free["free1"])
    alone = scene.answer("alone")
    for i in range(16):
        scene.ask(f"unbound-free{i}", **free[f"free{i}"])
    without = [scene.answer(f"unbound-free{i}") for i in range(16)]
    for i in range(16):
        scene.ask(f"bound{i}", grammar=SCHEMA, temperature=i % 3 * 0.7, seed=str(i), max_tokens=ENOUGH, stop_ids=[EOS])
        scene.ask(f"free{i}", **free[f"free{i}"])
    for i in range(16):
        scene.answer(f"bound{i}")
        [(text, finish)] = scene.texts(f"bound{i}").values()
        assert finish == "stop" and is_person(text), text
    assert [scene.answer(f"free{i}") for i in range(16)] == without and alone == without[1]


def test_choices_have_their_own_state(scene: LeaderScene) -> None:
    """Four choices of one request differ, and each is valid."""
    scene.ask("four", grammar=SCHEMA, temperature=1.0, seed="7", n=4, max_tokens=ENOUGH, logprobs=1)
    scene.answer("four")
    answers = scene.texts("four")
    assert all(finish == "stop" and is_person(text) for text, finish in answers.values())
    assert len({text for text, _ in answers.values()}) == 4


def test_a_grammar_goes_on_in_the_next_epoch(scene: LeaderScene) -> None:
    """A leader that comes after another rebuilds the state from the log; the answer is the one without a crash."""
    bad_words = [[ord("a")], [ord("b"), ord("b")]]
    wants = {"grammar": Grammar("regex", "([a-f]{3} ){30}!"), "temperature": 1.0, "seed": "3", "n": 2}
    wants |= {"bad_words": bad_words, "typical_p": 0.9}
    scene.ask("whole", **wants)
    scene.answer("whole")
    scene.ask("struck", **wants)
    until(lambda: len(scene.log("struck")) >= 20, 40.0)
    scene.redis.lapse()
    scene.answer("struck")
    whole, struck = (scene.texts(rid) for rid in ("whole", "struck"))
    assert scene.epoch() > 1 and struck == whole
    assert all(re.fullmatch("([a-f]{3} ){30}!", text) and finish == "stop" for text, finish in struck.values())
    assert not any("a" in text or "bb" in text for text, _ in struck.values())


def test_a_reasoning_ends_with_its_budget(scene: LeaderScene) -> None:
    """Its closing mark comes after so many tokens, over a crash too; what a grammar demands follows it."""
    opening, closing = [ord(letter) for letter in "<think>"], [ord(letter) for letter in "</think>"]
    budget = ReasoningBudget(tokens=30, open="<think>", close="</think>", opening=opening, closing=closing, begun=True)
    then = Grammar("lark", 'start: thought "yes"\nthought[suffix="</think>"]: /(.|\\n)*/')
    wants = {"reasoning": budget, "temperature": 1.0, "seed": "3", "n": 2, "bad_words": [[ord("<")]]}
    scene.ask("whole", **wants, max_tokens=60)
    scene.ask("struck", **wants, max_tokens=60)
    scene.ask("form", **wants, grammar=then)
    until(lambda: len(scene.log("struck")) >= 20, 40.0)
    scene.redis.lapse()
    assert scene.answer("struck") == scene.answer("whole")
    for rid in ("struck", "form"):
        scene.answer(rid)
        for choice in range(2):
            tokens = [entry.token for entry in scene.log(rid) if entry.choice == choice and entry.token is not None]
            assert tokens[30:38] == closing and closing[0] not in tokens[:30]
    assert all(text.endswith("</think>yes") for text, _ in scene.texts("form").values())


def test_a_preemption_changes_nothing(redis: ReplicaRedis, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory runs out a sequence is computed again, and its grammar is where it was."""
    preempted: list[str] = []
    real = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, one: (preempted.append(one.rid), real(self, one))[1])
    scene = LeaderScene(redis, folder, kv_tokens=260)
    try:
        for index in range(4):
            scene.ask(f"r{index}", grammar=Grammar("regex", "([a-f]{3} ){30}!"), max_tokens=130, seed=str(index))
        for index in range(4):
            scene.answer(f"r{index}")
            [(text, finish)] = scene.texts(f"r{index}").values()
            assert re.fullmatch("([a-f]{3} ){30}!", text) and finish == "stop"
        assert preempted
    finally:
        scene.stop()


def test_what_is_cut_short_says_so(scene: LeaderScene) -> None:
    """With too few tokens the text is the beginning of a valid one, and the reason is the length."""
    scene.ask("cut", grammar=Grammar("regex", "[a-c]{50}"), max_tokens=20)
    scene.answer("cut")
    [(text, finish)] = scene.texts("cut").values()
    assert finish == "length" and re.fullmatch("[a-c]{20}", text)


BOUND: list[tuple[Grammar, dict[str, Any], str]] = [
    (Grammar("choice", '["yes", "no"]'), {}, "yes|no"),
    (Grammar("choice", '["yes", "no"]'), {"stop_ids": [EOS], "min_tokens": 20}, "yes|no"),
    (Grammar("regex", "a?b?"), {"stop_ids": [EOS], "min_tokens": 2}, "a?b"),
    (Grammar("regex", "(ab)+"), {"stop_ids": [EOS], "min_tokens": 5, "temperature": 1.0}, "(ab){3,}"),
    (Grammar("lark", 'start: "x" num\nnum: /[0-9]{2}/'), {"logit_bias": {ord("x"): -100.0}}, "x[0-9]{2}"),
    (Grammar("regex", "[a-z]{8}"), {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, "[a-z]{8}"),
    (Grammar("regex", "[a-z]{8}"), {"temperature": 1.0, "top_p": 0.9}, "[a-z]{8}"),
    (Grammar("regex", "[ab]{9}"), {"repetition_penalty": 1.5, "presence_penalty": 1.0}, "[ab]{9}"),
    (Grammar("regex", "[ab]{9}"), {"bad_words": [[ord("a")]], "temperature": 1.0, "typical_p": 0.5}, "b{9}"),
]
"""Each response format, and a pattern of the text that it allows."""


def test_other_parameters_do_not_lead_out_of_it(scene: LeaderScene) -> None:
    """Penalties, filters, min_tokens and the absence of a stop id: the text matches, and its end is a stop."""
    for index, (grammar, sampling, _) in enumerate(BOUND):
        scene.ask(f"r{index}", grammar=grammar, seed="5", **sampling)
    for index, (_, _, expected) in enumerate(BOUND):
        scene.answer(f"r{index}")
        [(text, finish)] = scene.texts(f"r{index}").values()
        assert re.fullmatch(expected, text) and finish == "stop", (index, text, finish)


def test_a_grammar_that_can_not_go_on_fails_alone(scene: LeaderScene) -> None:
    """Whatever is wrong with one, its choice ends with the reason and its neighbour goes on."""
    scene.ask("neighbour", max_tokens=60)
    scene.ask("broken", grammar=Grammar("regex", "("))
    scene.ask("letterless", grammar=Grammar("regex", "aé"))
    scene.ask("wordless", grammar=Grammar("regex", "[ab]+"), bad_words=[[ord("a")], [ord("b")]])
    reasons = {"broken": "unclosed group", "letterless": "no token of this model", "wordless": "'bad_words' forbids"}
    for rid, words in reasons.items():
        scene.answer(rid)
        last = scene.log(rid)[-1]
        assert last.token is None and last.finish == "error" and words in (last.cause or "")
    assert len(scene.answer("neighbour")) == 60


def test_samplers_of_the_context_go_on_in_the_next_epoch(scene: LeaderScene) -> None:
    """DRY, XTC, top-nσ, a dynamic temperature and a list of tokens are functions of the context and the seed alone."""
    wants: dict[str, Any] = {"temperature": 1.0, "seed": "3", "n": 2, "max_tokens": 60}
    wants |= {"allowed_token_ids": [ord(letter) for letter in "abcd"], "dry_multiplier": 2.0, "dry_base": 2.0}
    wants |= {"xtc_probability": 0.5, "xtc_threshold": 0.1, "top_n_sigma": 3.0, "dynatemp_range": 0.5}
    scene.ask("whole", **wants)
    scene.answer("whole")
    scene.ask("struck", **wants)
    until(lambda: len(scene.log("struck")) >= 20, 40.0)
    scene.redis.lapse()
    scene.answer("struck")
    whole, struck = (scene.texts(rid) for rid in ("whole", "struck"))
    assert scene.epoch() > 1 and struck == whole
    assert all(re.fullmatch("[abcd]{60}", text) for text, _ in struck.values())


def test_a_list_of_tokens_that_no_grammar_allows(scene: LeaderScene) -> None:
    """The choice fails with the remedy, and its neighbour does not."""
    scene.ask("neighbour", max_tokens=20)
    scene.ask("none", grammar=Grammar("regex", "b+"), allowed_token_ids=[ord("a")], max_tokens=9)
    scene.answer("neighbour")
    scene.answer("none")
    assert [finish for _, finish in scene.texts("neighbour").values()] == ["length"]
    [last] = scene.log("none")
    assert last.finish == "error" and "'allowed_token_ids' has no token" in (last.cause or "")
