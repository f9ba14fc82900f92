"""The demonstration model's text is right: deterministic, and with held-out questions that training never shows."""

import itertools
import random

import pytest

from training.tasks import arithmetic, tasks
from training.tasks.counting import counted
from training.tasks.example import expand
from training.tasks.facts import VOCABULARY
from training.tasks.situations import SITUATIONS

SAMPLE = 4000


def _first(seed: int, count: int) -> list[tasks.Conversation]:
    return list(itertools.islice(tasks.training(seed), count))


def test_the_same_seed_gives_the_same_text() -> None:
    """Two runs with one seed agree, and another seed differs."""
    assert _first(1, 200) == _first(1, 200)
    assert _first(1, 200) != _first(2, 200)
    assert tasks.held_out(5, 4) == tasks.held_out(5, 4)


@pytest.mark.parametrize("task", tasks.SHARES, ids=lambda task: task.__name__)
def test_every_task_has_questions_on_both_sides(task: tasks.Task) -> None:
    """No task is wholly trained on or wholly held out, so that each one is measured."""
    rng = random.Random(3)
    sides = {task(rng).held_out for _ in range(2000)}
    assert sides == {True, False}


def test_training_never_shows_a_held_out_question() -> None:
    """No user's turn in the training text equals a held-out question of a task, memory questions aside."""
    shown = {m["content"] for c in _first(1, SAMPLE) for m in c.messages if m["role"] == "user"}
    kept = {c.messages[-1]["content"] for c in tasks.held_out(2, 40) if c.task != "memory"}
    assert len(kept) > 300
    assert not shown & kept


def test_a_held_out_pair_is_held_out_in_both_orders_and_every_wording() -> None:
    """The key of a sum is its unordered pair of numbers."""
    rng = random.Random(4)
    sides: dict[frozenset[str], set[bool]] = {}
    for _ in range(SAMPLE):
        example = arithmetic.add(rng)
        sides.setdefault(frozenset(example.key.split(",")), set()).add(example.held_out)
    assert all(len(side) == 1 for side in sides.values())


def test_counting_goes_both_ways() -> None:
    """Both ends are included, and the order follows the question."""
    assert counted(3, 6) == "3, 4, 5, 6."
    assert counted(6, 3) == "6, 5, 4, 3."


def test_patterns_expand_to_every_sentence() -> None:
    """Each group contributes each of its choices, and an empty choice leaves no double space."""
    assert expand("(see|show) the queue(| now)") == [
        "see the queue", "see the queue now", "show the queue", "show the queue now",
    ]  # fmt: skip


def test_facts_are_many_and_short() -> None:
    """At least twenty-five facts, each of one to three sentences, no answer twice."""
    answers = [fact.answer for fact in VOCABULARY + SITUATIONS]
    assert len(answers) == len(set(answers)) >= 25
    assert all(1 <= answer.count(". ") + 1 <= 3 and answer.endswith(".") for answer in answers)
