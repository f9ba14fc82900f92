"""Forbidden sequences: the index says the same as a search of them all, and does not grow with them."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from control.messages import GenerationRequest, Sampling, decode_request, encode
from worker.sampling.constraints import BadWords, BadWordsIndex
from worker.scheduling.sequence import Sequence

VOCABULARY = 4
words = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4), min_size=1, max_size=12)


@given(sequences=words, output=st.lists(st.integers(0, VOCABULARY - 1), max_size=12))
def test_the_index_equals_a_search_of_all(sequences: list[list[int]], output: list[int]) -> None:
    """Single tokens always; a longer sequence's last one where the output ends with those before it."""
    searched = {tokens[-1] for tokens in sequences if (output + tokens[-1:])[-len(tokens) :] == tokens}
    assert set(BadWords(sequences).forbidden(output)) == searched


@given(sequences=words, output=st.lists(st.integers(0, VOCABULARY - 1), min_size=4, max_size=12))
def test_the_index_equals_transformers(sequences: list[list[int]], output: list[int]) -> None:
    """transformers removes the same tokens."""
    scores = NoBadWordsLogitsProcessor(sequences)(torch.tensor([output]), torch.zeros(1, VOCABULARY))
    removed = {token for token in range(VOCABULARY) if scores[0, token] == float("-inf")}
    assert set(BadWords(sequences).forbidden(output)) == removed


@pytest.mark.parametrize(
    "bad",
    [
        [[word % 50_000, *range(word % 20), word] for word in range(4_000)],
        [[7] * length for length in range(2, 181)],
    ],
    ids=["many", "each in the next"],
)
def test_thousands_of_tokens_cost_a_step_little(bad: list[list[int]]) -> None:
    """A step reads the output backwards as far as it matches, not each word."""
    index, sampling = BadWordsIndex(), Sampling(max_tokens=9, bad_words=bad)
    row = Sequence(rid="r", choice=0, prompt=[1], sampling=sampling, sid=1, output=[7] * 10_000)
    index.forbidden([row])
    started = time.process_time()
    for _ in range(1_000):
        index.forbidden([row])
    assert time.process_time() - started < 0.5  # a comparison with each takes more than a second


def test_a_request_without_bad_words_is_encoded_as_before() -> None:
    """A worker of an older version reads it, and one of this version reads an older API's."""
    plain = encode(GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=9)))
    assert b"bad_words" not in plain and b"typical_p" not in plain
    assert decode_request(plain).sampling == Sampling(max_tokens=9)
    full = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=9, bad_words=[[1], [2, 3]], typical_p=0.5))
    assert decode_request(encode(full)) == full
