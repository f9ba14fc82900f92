"""DRY penalises repetitions: what they cost their next tokens, against llama.cpp's own examples and a search of all
occurrences."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from control.messages import Sampling
from tests.byte_model import byte_tokenizer
from worker.sampling.constraints import Constraints
from worker.sampling.dry import Repetitions, reductions_of
from worker.scheduling.sequence import Sequence

TOKENIZER = byte_tokenizer()


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def reduced(text: str, *, output: str = "", guessed: str = "", **sampling: Any) -> dict[str, float]:
    """By the next character, what its logit loses."""
    options = {"max_tokens": 9, "dry_multiplier": 1.0, "dry_base": 2.0} | sampling
    sequence = Sequence(
        sid=1,
        rid="r",
        choice=0,
        prompt=TOKENIZER.encode(text).ids,
        sampling=Sampling(**options),
        output=TOKENIZER.encode(output).ids,
        guessed=tuple(TOKENIZER.encode(guessed).ids),
    )
    reductions = Repetitions(decode).reductions([sequence])
    return {decode([token]): value for token, value in reductions.get(0, {}).items()}


@pytest.mark.parametrize(
    ("context", "multiplier", "last", "expected"),
    [
        ([0, 1], 1.0, 4, {}),
        ([0, 1, 2, 0, 1], 1.0, 5, {2: 1.0}),
        ([0, 1, 3, 4, 0, 1], 2.0, 6, {3: 2.0}),
        ([0, 1, 2, 3, 4, 0, 1], 2.0, 7, {2: 2.0}),
        ([0, 1, 2, 3, 4, 0, 1, 2], 1.0, 8, {3: 1.1}),
    ],
)
def test_the_examples_of_llama_cpp(
    context: list[int], multiplier: float, last: int, expected: dict[int, float]
) -> None:
    """tests/test-sampling.cpp has them with base 1.1 and two allowed tokens."""
    sampling = Sampling(max_tokens=1, dry_multiplier=multiplier, dry_base=1.1, dry_allowed_length=2)
    reductions = reductions_of(np.array(context[-last:]), last, sampling)
    assert reductions == {token: pytest.approx(value) for token, value in expected.items()}


def test_any_context_equals_a_search_of_all_occurrences() -> None:
    """Of contexts with many repetitions, and of limits of every size."""
    chance = random.Random(3)
    for _ in range(400):
        context = [chance.randrange(chance.choice([1, 2, 5])) for _ in range(chance.randrange(1, 60))]
        allowed, unbroken = chance.randrange(1, 6), chance.choice([0, 1, 3, 100])
        sampling = Sampling(max_tokens=1, dry_multiplier=0.8, dry_base=1.75, dry_allowed_length=allowed)
        expected: dict[int, float] = {}
        for end in range(len(context) - 1):
            length = 0
            while length <= end and length < unbroken and context[end - length] == context[-1 - length]:
                length += 1
            if length >= allowed:
                penalty = 0.8 * 1.75 ** (length - allowed)
                expected[context[end + 1]] = max(penalty, expected.get(context[end + 1], 0.0))
        assert reductions_of(np.array(context), unbroken, sampling) == pytest.approx(expected), context


def test_prompt_output_and_guesses_are_one_context() -> None:
    """A sequence may begin in one and end in the next."""
    assert reduced("abcd x", output="ab") == {"c": 1.0}
    assert reduced("abcd x", output="ab", guessed="c") == {"d": 2.0}
    assert reduced("abcd x", output="ab", dry_multiplier=0.0) == {}
    assert reduced("abcd x", output="ab", dry_allowed_length=3) == {}


def test_only_the_last_tokens_are_compared() -> None:
    """`dry_penalty_last_n` counts from the end; 0 compares nothing."""
    assert reduced("abcd xab", dry_penalty_last_n=8) == {"c": 1.0}
    assert reduced("abcd xab", dry_penalty_last_n=7) == {}
    assert reduced("abcd xab", dry_penalty_last_n=0) == {}


def test_a_sequence_ends_at_a_breaker() -> None:
    """A repetition counts from behind the last breaker on, which may be written by several tokens."""
    assert reduced("x\nabc x\nab") == {"c": 4.0}
    assert reduced("x\nabc x\nab", dry_sequence_breakers=["\n"]) == {"c": 1.0}
    assert reduced("x\nabc x\nab", dry_sequence_breakers=["x\na"]) == {}
    assert reduced("x\nabc x\nab", dry_sequence_breakers=["x\n"]) == {"c": 1.0}
    assert reduced("x\nabc x\nab", dry_sequence_breakers=["b"]) == {}


def test_a_long_repetition_stays_a_number() -> None:
    """Also where the base would lift it beyond float32, and with a base of 1."""
    [(_, value)] = reduced("ab" * 2000, dry_base=100.0).items()
    assert value == 1e30 and math.isfinite(float(np.float32(value)))
    assert set(reduced("ab" * 2000, dry_base=1.0).values()) == {1.0}


def test_no_request_is_asked_for_it_by_default() -> None:
    """The constraints of plain rows are empty."""
    row = Sequence(sid=1, rid="r", choice=0, prompt=[1, 2, 1, 2], sampling=Sampling(max_tokens=9))
    constraints, failed = Constraints(decode).of([row])
    assert not constraints.reductions and not failed
