"""Ends of a sequence: stop ids, stop strings and length, and which of them wins."""

from __future__ import annotations

from typing import Any

from control.messages import Sampling
from worker.scheduling.sequence import Finisher, Sequence

STOP = 0


def decode(tokens: list[int]) -> str:
    """Token 1 is a, 2 is b, …; the stop token has no text."""
    return "".join(chr(96 + token) for token in tokens if token != STOP)


def ends(tokens: list[int], *, before: list[int] | None = None, **sampling: Any) -> list[tuple[str, str | None] | None]:
    """The decision at each of `tokens`, after `before` was there when the sequence was taken up."""
    parameters = {"max_tokens": 10, "stop_ids": [STOP]} | sampling
    sequence = Sequence(rid="r", choice=0, prompt=[1], output=list(before or []), sampling=Sampling(**parameters))
    finisher, decided = Finisher(decode), []
    finisher.adopt(sequence)
    for token in tokens:
        sequence.output.append(token)
        decided.append(finisher.decide(sequence, token))
    return decided


def test_a_stop_id_ends_with_the_cause_token() -> None:
    """A stop id ends with the cause "token"."""
    assert ends([1, STOP]) == [None, ("stop", "token")]


def test_stop_id_before_min_tokens() -> None:
    """A stop id among the first min_tokens tokens ends nothing."""
    assert ends([STOP, 1, STOP], min_tokens=2) == [None, None, ("stop", "token")]


def test_the_last_allowed_token_ends_by_length() -> None:
    """The last allowed token ends by length, without a cause."""
    assert ends([1, 1], max_tokens=2) == [None, ("length", None)]


def test_stop_wins_over_length() -> None:
    """A stop that comes with the last allowed token is a stop."""
    assert ends([1, STOP], max_tokens=2)[-1] == ("stop", "token")
    assert ends([1, 2], max_tokens=2, stop=["ab"])[-1] == ("stop", "ab")


def test_stop_string_across_tokens() -> None:
    """A stop string made of several tokens ends with the token that completes it."""
    assert ends([3, 1, 2, 3], stop=["xyz", "ab"]) == [None, None, ("stop", "ab"), None]


def test_stop_string_begun_before_adoption() -> None:
    """A stop string whose beginning an earlier epoch put out is found by the next."""
    assert ends([2], before=[3, 1], stop=["ab"]) == [("stop", "ab")]


def test_stop_string_after_min_tokens_only() -> None:
    """Text of the first min_tokens tokens is not searched, also when they were put out before adoption."""
    assert ends([1, 1, 1], stop=["a"], min_tokens=2) == [None, None, ("stop", "a")]
    assert ends([1], before=[1, 1], stop=["a"], min_tokens=2) == [("stop", "a")]


def test_no_stop_string_no_text() -> None:
    """Rows without stop strings are never detokenised."""
    sequence = Sequence(rid="r", choice=0, prompt=[1], sampling=Sampling(max_tokens=3))
    Finisher(decode).adopt(sequence)
    assert sequence.text is None
