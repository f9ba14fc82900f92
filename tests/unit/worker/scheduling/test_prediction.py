"""A request's prediction becomes guesses; and how many of its tokens an answer has."""

from __future__ import annotations

import random
from collections.abc import Sequence as Tokens
from threading import Event, Thread, current_thread
from typing import Literal

import numpy as np
import pytest

from control.messages import GenerationRequest, Sampling
from control.requests import Claimed
from worker.leader.request import RunningRequest
from worker.scheduling.lookup import (
    FIRST_GUESSES,
    INDEXED_AT_ONCE,
    NGRAM,
    PAST_TOKENS,
    Accepted,
    ContextLookup,
    Places,
    Prediction,
)
from worker.scheduling.sequence import Sequence

PROMPT = list(range(100, 140))


def accepted(prediction: list[int], output: list[int]) -> int:
    """The tokens of `prediction` that `output` has."""
    one = Accepted(Prediction(PROMPT, prediction))
    one.follow(output)
    return one.count


def steps_to_say(answer: list[int], prediction: list[int], most: int = 8) -> int:
    """Forwards until a model that says `answer` has said it."""
    sampling = Sampling(max_tokens=len(answer), prediction=prediction)
    one = Sequence(rid="r", choice=0, prompt=PROMPT, sampling=sampling)
    lookup, steps = ContextLookup(Prediction(PROMPT, prediction)), 0
    while len(one.output) < len(answer):
        guesses = lookup.guesses(one, most)
        right, steps = 0, steps + 1
        rest = answer[len(one.output) :]
        while right < min(len(guesses), len(rest) - 1) and guesses[right] == rest[right]:
            right += 1
        one.output += rest[: right + 1]
        if guesses:
            lookup.verified(one, len(guesses), right, most)
    return steps


def test_a_prediction_is_guessed_from_the_first_token_on() -> None:
    """The prompt's end is followed by it; without it nothing is known of the answer."""
    answer = random.Random(3).sample(range(1000, 9000), 200)
    one = Sequence(rid="r", choice=0, prompt=PROMPT, sampling=Sampling(max_tokens=9))
    assert ContextLookup(Prediction(PROMPT, answer)).guesses(one, 8) == answer[:FIRST_GUESSES]
    assert ContextLookup().guesses(one, 8) == []
    assert steps_to_say(answer, answer) < 200 / 7 and steps_to_say(answer, []) == 200


def test_guesses_go_on_behind_an_edit() -> None:
    """A file of alike lines, more than are looked through from the end: one is changed, one added, one left out."""
    draw = random.Random(4)
    lines = [[1, 2, 3, draw.randrange(1000, 9000), 4, 5, 6] for _ in range(100)]
    changed = [*lines[:30], [1, 2, 3, 77, 78, 5, 6], *lines[31:60], [9, 9, 8], *lines[60:80], *lines[81:]]
    file, edited = ([token for line in text for token in line] for text in (lines, changed))
    assert steps_to_say(edited, file) < len(edited) / 4
    assert steps_to_say(edited, draw.sample(range(10_000, 20_000), 700)) > len(edited) / 4, "the control"


@pytest.mark.parametrize(
    ("prediction", "output", "count"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 4),
        ([1, 2, 3, 4], [], 0),
        ([], [1, 2, 3], 0),
        ([1, 2, 3, 4], [9, 9, 9, 9], 0),
        ([1, 2], [1, 2, 3, 4], 2),
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 9, 4, 5, 6, 7], 6),  # one exchanged
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 8, 8, 3, 4, 5, 6, 7], 7),  # two added
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 5, 6, 7], 5),  # two left out
        ([1, 2, 3, 4, 5, 6], [7, 7, 7, 1, 2, 3, 4, 5, 6], 6),  # something said before
        ([5, 5, 5, 5], [5] * 50, 4),
        ([5] * 50, [5] * 4, 4),
    ],
)
def test_tokens_of_a_prediction_in_an_answer(prediction: list[int], output: list[int], count: int) -> None:
    assert accepted(prediction, output) == count


def test_no_more_tokens_are_counted_than_both_have() -> None:
    draw = random.Random(5)
    for _ in range(300):
        prediction, output = ([draw.randrange(3) for _ in range(draw.randrange(30))] for _ in range(2))
        assert 0 <= accepted(prediction, output) <= min(len(prediction), len(output))
        assert accepted(prediction, prediction) == len(prediction)


class Counted(Prediction):
    """Counts the lookups."""

    lookups = 0

    def starts(self, gram: Tokens[int]) -> Places:
        self.lookups += 1
        return super().starts(gram)


@pytest.mark.parametrize("answer", [[2] * 600, [1, 1, 2] * 200, [1, 1, 1, 2] * 150])
def test_each_token_of_an_answer_is_looked_up_once_at_most(answer: list[int]) -> None:
    """Also where it has the prediction's n-grams and never goes on as that does; piece by piece it counts alike."""
    counted, output = Counted(PROMPT, [1] * 2000), list[int]()
    one = Accepted(counted)
    for token in answer:
        before = counted.lookups
        output.append(token)
        one.follow(output)
        assert counted.lookups - before <= 1
    assert 0 < counted.lookups <= len(answer)
    before = counted.lookups
    one.follow(output)
    assert counted.lookups == before, "what was followed is not read again"
    assert one.count == accepted([1] * 2000, answer)


def test_an_answer_does_not_meet_the_prompt() -> None:
    """Its end is in the index for the guesses only."""
    assert accepted([1, 2, 3, 4], PROMPT[-5:]) == 0
    assert accepted(PROMPT, [0, *PROMPT[-5:]]) == 5


def test_a_large_prediction_is_indexed_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lookup sorts it in its caller's thread or waits for the one that does, and it finds the same meanwhile."""
    draw, argsort, sorts = random.Random(6), np.argsort, list[Thread]()
    answer = [draw.randrange(9) for _ in range(3 * INDEXED_AT_ONCE)]
    begun, go_on = Event(), Event()

    def slow(grams: Places, kind: Literal["stable"]) -> Places:
        sorts.append(current_thread())
        begun.set()
        assert go_on.wait(20)
        return argsort(grams, kind=kind)

    monkeypatch.setattr(np, "argsort", slow)
    prediction = Prediction(PROMPT, answer)
    grams = [*(answer[at : at + NGRAM] for at in range(0, 3000, 500)), [8, 8, 9], PROMPT[-2:] + answer[:1]]
    found = [prediction.starts(gram).tolist() for gram in grams]
    output = answer[:50] + answer[90:120]
    one = Accepted(prediction)
    one.follow(output)
    assert begun.wait(20)
    [thread] = sorts
    assert thread is not current_thread() and thread.is_alive()
    go_on.set()
    thread.join(20)
    assert [prediction.starts(gram).tolist() for gram in grams] == found and len(sorts) == 1
    assert found[6] == [] and found[7] == [PAST_TOKENS - 2] and all(found[:6])
    # No second prediction: its thread would still sort during the next test.
    again = Accepted(prediction)
    again.follow(output)
    assert again.count == one.count > 70


def test_the_choices_of_a_request_share_one_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is made for the guesses and the counts of all, and the end of a choice looks at its last token only."""
    sorts, argsort = list[int](), np.argsort

    def counted(grams: Places, kind: Literal["stable"]) -> Places:
        sorts.append(len(grams))
        return argsort(grams, kind=kind)

    monkeypatch.setattr(np, "argsort", counted)
    sampling = Sampling(max_tokens=9, n=4, prediction=list(range(1000, 1500)))
    params = GenerationRequest(prompt=PROMPT, sampling=sampling)
    request = RunningRequest.begin(Claimed("r", "t", "normal", 1, 0, 0, 4, 0), params)
    for sequence in request.live:
        assert ContextLookup(sequence.prediction).guesses(sequence, 8) == [1000, 1001, 1002, 1003]
        for token in (900, 901, 902, 1200, 1201, 1202, 1203):
            sequence.output.append(token)
            request.append(sequence.choice, token, "length" if token == 1203 else None)
    assert [entry.predicted for entry in request.history if entry.finish] == [4] * 4
    assert sorts == [len(sampling.prediction) + PAST_TOKENS - NGRAM + 1]
