"""Headers of a key's remaining limits: OpenAI's and Anthropic's."""

from __future__ import annotations

import pytest

from api.http.limits import anthropic_ratelimit_headers, duration, estimate, ratelimit_headers
from control.access import Allowance, mint
from control.errors import RequestTooLarge
from control.messages import GenerationRequest, Sampling


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0s"),
        (17, "17ms"),
        (1000, "1s"),
        (8640, "8.64s"),
        (60_000, "1m0s"),
        (360_000, "6m0s"),
        (90_951, "1m30.951s"),
        (3_603_250, "1h0m3.25s"),
    ],
)
def test_durations_have_the_form_of_go(ms: int, text: str) -> None:
    """As Go writes them."""
    assert duration(ms) == text


def test_only_limits_that_there_are() -> None:
    """A key without a limit on tokens tells nothing of tokens."""
    assert ratelimit_headers(Allowance(60, 59, 1000, 0, 0, 0)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
    }


def test_anthropics_headers_have_a_moment_in_rfc_3339() -> None:
    """The limit is whole again at a moment, in RFC 3339 and rounded up to a second."""
    assert anthropic_ratelimit_headers(Allowance(0, 0, 0, 900, 100, 1500), 1_767_225_599.2) == {
        "anthropic-ratelimit-tokens-limit": "900",
        "anthropic-ratelimit-tokens-remaining": "100",
        "anthropic-ratelimit-tokens-reset": "2026-01-01T00:00:01Z",
    }


def member(prompt: int, max_tokens: int, n: int = 1) -> GenerationRequest:
    return GenerationRequest(prompt=[1] * prompt, sampling=Sampling(max_tokens=max_tokens, n=n))


def test_the_estimate_counts_prompt_and_answers_up_to_a_bound() -> None:
    """Prompts and what each choice may write, up to a bound; never more than the limit itself."""
    key, _ = mint(tpm=10_000)
    assert estimate(key, [member(10, 50, 2), member(5, 7)]) == [110, 12]
    assert estimate(key, [member(10, 100_000)]) == [10 + 1024]
    assert estimate(key, [member(9_999, 100)]) == [10_000]
    assert estimate(key, [member(9_000, 700), member(500, 700)]) == [9_500, 500]


def test_what_can_never_pass() -> None:
    """A prompt, or a list of prompts, beyond what a minute allows."""
    with pytest.raises(RequestTooLarge, match="10001 tokens"):
        estimate(mint(tpm=10_000)[0], [member(10_001, 1)])
    with pytest.raises(RequestTooLarge, match="3 prompts"):
        estimate(mint(rpm=2)[0], [member(1, 1)] * 3)
