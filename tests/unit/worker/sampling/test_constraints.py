"""Bad words and reasoning budgets constrain tokens: what the first forbid, and closing marks that the second force."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from control.messages import GenerationRequest, ReasoningBudget, Sampling, TokenLogprobs, decode_request, encode
from worker.engine.step import Forward
from worker.sampling.constraints import BadWords, BadWordsIndex, closing_token
from worker.sampling.sampler import StepSampler, StepTokens
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


OPEN, CLOSE, BLANK = 0, 1, 2
TOKEN_IDS = 5


def budget(tokens: int, begun: bool = True) -> ReasoningBudget:
    return ReasoningBudget(tokens=tokens, open="<", close=">", opening=[OPEN], closing=[CLOSE], begun=begun)


def texts(tokens: int) -> ReasoningBudget:
    """Marks of several tokens, as a model writes them whose vocabulary lacks them."""
    return ReasoningBudget(tokens=tokens, open="abc", close="cba", opening=[0, 1, 2], closing=[2, 1, 0], begun=False)


def decode(tokens: list[int]) -> str:
    return "".join("abc de"[token] for token in tokens)


@given(
    tokens=st.integers(0, 6),
    begun=st.booleans(),
    wanted=st.lists(st.integers(0, TOKEN_IDS - 1), max_size=20),
)
def test_no_reasoning_is_longer_than_its_budget(tokens: int, begun: bool, wanted: list[int]) -> None:
    """Whatever the model wants, at most `tokens` tokens lie between the marks; after them it is free."""
    output: list[int] = []
    forced: list[int] = []
    for position, token in enumerate(wanted):
        closing = closing_token(budget(tokens, begun), output, None)
        if closing is not None:
            assert closing == CLOSE
            forced.append(position)
        output.append(token if closing is None else closing)
    assert len(forced) <= 1
    start = 0 if begun else output.index(OPEN) + 1 if OPEN in output[:9] else None
    if start is not None and len(output) > start + tokens:
        assert CLOSE in output[: start + tokens + 1]
        assert forced in ([], [start + tokens])
    if start is None:
        assert forced == []


def test_marks_of_several_tokens() -> None:
    """They are found in the text, forced one token after the other, and not again where the model wrote them."""
    opened, out = [3, 0, 1, 2], [4, 4]
    assert [closing_token(texts(2), (opened + out)[:count], decode) for count in range(6)] == [None] * 6
    written = opened + out
    for expected in (2, 1, 0, None):
        assert closing_token(texts(2), written, decode) == expected
        written = [*written, 4 if expected is None else expected]
    closed = [*opened, 2, 1, 0]
    assert [closing_token(texts(3), [*closed, *[4] * count], decode) for count in range(6)] == [None] * 6
    assert closing_token(texts(0), [4] * 4, decode) is None


def test_marks_with_control_tokens() -> None:
    """Their text lacks what is skipped when tokens are decoded: they are found by their tokens."""

    def without_control(tokens: list[int]) -> str:
        return decode([token for token in tokens if token not in (0, 2)])

    written = [3, 0, 1, 2, 4, 4]
    for expected in (2, 1, 0, None):
        assert closing_token(texts(2), written, without_control) == expected
        written = [*written, 4 if expected is None else expected]
    closed = [0, 1, 2, 4, 2, 1, 0]
    assert [closing_token(texts(3), [*closed, *[4] * count], without_control) for count in range(6)] == [None] * 6


def rows(**sampling: object) -> list[Sequence]:
    fields = {"max_tokens": 9, "temperature": 0.0, "seed": "1"} | sampling
    return [Sequence(rid="r", choice=0, prompt=[1], sampling=Sampling(**fields), sid=1)]  # type: ignore[arg-type]


def sampled(batch: list[Sequence], on_device: bool | None) -> StepTokens:
    logits = torch.tensor([[0.0, 0.0, 0.0, 1.0, 2.0]])
    return StepSampler(on_device).begin(batch, Forward([1], logits)).wait()


@pytest.mark.parametrize("on_device", [None, True])
@pytest.mark.parametrize("wish", [{}, {"temperature": 1.0, "top_k": 1}, {"bad_words": [[CLOSE]]}, {"logprobs": 1}])
def test_the_mark_goes_before_all_other_parameters(on_device: bool | None, wish: dict[str, object]) -> None:
    """Only where the budget ends; log probabilities are the model's own."""
    batch = rows(reasoning=budget(2), **wish)
    for output, expected in (([3], 4), ([3, 3], CLOSE), ([3, CLOSE], 4), ([3, 3, CLOSE], 4)):
        batch[0].output = list(output)
        tokens = sampled(batch, on_device)
        assert tokens.ids == [expected]
        if "logprobs" in wish and expected == CLOSE:
            scores = tokens.logprobs[0]
            assert isinstance(scores, TokenLogprobs) and scores.top[0][0] == 4 and scores.chosen < scores.top[0][1]


def test_a_long_answer_costs_nothing_after_its_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the end of the budget and after it lengths are compared, and nothing is read."""
    monkeypatch.setattr("worker.sampling.constraints._opened", None)
    monkeypatch.setattr("worker.sampling.constraints._has", None)
    for length in (0, 99, 200, 100_000):
        assert closing_token(budget(100, False), [3] * length, decode) is None


def test_it_travels_only_where_it_is_asked_for() -> None:
    """A request without one is encoded as before."""
    request = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=9, reasoning=budget(7)))
    assert decode_request(encode(request)) == request
    assert b"reasoning" not in encode(GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=9)))
