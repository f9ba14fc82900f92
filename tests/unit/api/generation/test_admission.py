"""Defaults and limits are applied before enqueueing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from api.generation.client_request import generation_request
from api.schemas.chat import ChatRequest, parse_chat
from api.schemas.completions import parse_completion
from control.errors import ContextLengthExceeded, RequestError, RequestTooLarge
from control.messages import Grammar, ModelAssets
from tests.byte_model import byte_assets


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(msgspec.json.encode({"messages": [{"role": "user", "content": "x"}], **fields}))


def assets(**changes: Any) -> ModelAssets:
    return byte_assets(context_length=100, kv_tokens=80, **changes)


def test_the_request_goes_before_the_model_before_openai() -> None:
    """Each parameter comes from the first of the three that has it."""
    config = {"temperature": 0.6, "top_k": 20, "top_p": None}
    sampling = generation_request(chat(temperature=0), [1], assets(generation_config=config)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 20, 1.0)


def test_typical_p_and_bad_words() -> None:
    """typical_p's default is the model's, else off; token sequences of bad words stay beside a grammar."""
    assert generation_request(chat(), [1], assets()).sampling.typical_p == 1.0
    assert generation_request(chat(), [1], assets(generation_config={"typical_p": 0.7})).sampling.typical_p == 0.7
    assert (
        generation_request(chat(typical_p=1), [1], assets(generation_config={"typical_p": 0.7})).sampling.typical_p
        == 1.0
    )
    grammar = Grammar("json_object")
    both = generation_request(chat(), [1], assets(), grammar, bad_words=[[1, 2]]).sampling
    assert (both.grammar, both.bad_words) == (grammar, [[1, 2]])


def test_without_a_limit_the_rest_is_used() -> None:
    """max_tokens omitted means what context and memory leave."""
    assert generation_request(chat(), [1] * 10, assets()).sampling.max_tokens == 70
    assert generation_request(chat(), [1] * 10, byte_assets(context_length=50)).sampling.max_tokens == 40


def test_the_model_caps_answers_without_a_limit() -> None:
    """generation_config.json's max_new_tokens, or max_length, is the default; a request's own limit goes before it."""
    capped = assets(generation_config={"max_new_tokens": 20, "max_length": 15})
    assert generation_request(chat(), [1] * 10, capped).sampling.max_tokens == 20
    assert generation_request(chat(max_tokens=40), [1] * 10, capped).sampling.max_tokens == 40
    assert generation_request(chat(min_tokens=30), [1] * 10, capped).sampling.max_tokens == 30
    assert generation_request(chat(), [1] * 75, capped).sampling.max_tokens == 5
    by_length = assets(generation_config={"max_length": 30})
    assert generation_request(chat(), [1] * 10, by_length).sampling.max_tokens == 20
    assert generation_request(chat(), [1] * 30, by_length).sampling.max_tokens == 50
    for value in (0, -1, "7", None, 1.5):
        unusable = assets(generation_config={"max_new_tokens": value, "max_length": value})
        assert generation_request(chat(), [1] * 10, unusable).sampling.max_tokens == 70


def test_too_long_and_too_large() -> None:
    """With `strict` over the context is a 400 with both numbers, over the memory a 413; each names its field."""
    with pytest.raises(ContextLengthExceeded) as caught:
        generation_request(parse_completion(b'{"prompt": "x", "max_tokens": 91}'), [1] * 10, assets(), strict=True)
    assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.param) == (10, 91, "prompt")
    with pytest.raises(ContextLengthExceeded):
        generation_request(chat(), [1] * 100, assets())
    with pytest.raises(RequestTooLarge):
        generation_request(chat(max_tokens=71), [1] * 10, assets(), strict=True)
    assert generation_request(chat(max_tokens=70), [1] * 10, assets(), strict=True).sampling.max_tokens == 70


@pytest.mark.parametrize("asked", [70, 71, 100, 10**9])
def test_a_limit_beyond_the_context_is_cut_to_what_is_left(asked: int) -> None:
    assert generation_request(chat(max_tokens=asked), [1] * 10, assets()).sampling.max_tokens == 70
    with pytest.raises(RequestTooLarge):
        generation_request(chat(max_tokens=asked), [1] * 80, assets())


def test_no_fewer_tokens_can_be_asked_than_are_left() -> None:
    with pytest.raises(RequestError, match="'min_tokens' \\(71\\)"):
        generation_request(chat(max_tokens=90, min_tokens=71), [1] * 10, assets())


def test_every_end_of_sequence_id_stops() -> None:
    """All of the model's, and the request's own; ignore_eos leaves only the latter."""
    of_model = assets(eos_ids=[7, 9])
    assert generation_request(chat(stop_token_ids=[3]), [1], of_model).sampling.stop_ids == [3, 7, 9]
    assert generation_request(chat(stop_token_ids=[3], ignore_eos=True), [1], of_model).sampling.stop_ids == [3]


def test_seeds_are_unsigned() -> None:
    """A negative seed is the same as its unsigned form; without one, or with -1, each request draws its own."""
    assert generation_request(chat(seed=-2), [1], assets()).sampling.seed == str(2**64 - 2)
    assert len({generation_request(chat(seed=seed), [1], assets()).sampling.seed for seed in (-1, -1, None, None)}) == 4


def test_a_limit_of_minus_one_is_no_limit() -> None:
    """The rest of the context is generated, strict or not, whatever the model's default and the endpoint's."""
    capped = assets(generation_config={"max_new_tokens": 5})
    for request in (chat(max_tokens=-1), chat(max_completion_tokens=-1)):
        assert generation_request(request, [1] * 10, capped, strict=True).sampling.max_tokens == 70
    assert (
        generation_request(parse_completion(b'{"prompt": "x", "max_tokens": -1}'), [1] * 10, capped).sampling.max_tokens
        == 70
    )
    assert len({generation_request(chat(), [1], assets()).sampling.seed for _ in range(10)}) == 10


@pytest.mark.parametrize(
    ("config", "default"),
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": False, "temperature": 0.6}, 0.6),
        ({}, 1.0),
    ],
)
def test_a_model_that_does_not_sample_answers_with_the_most_likely_tokens(
    config: dict[str, object], default: float
) -> None:
    model_assets = assets(generation_config=config)
    assert generation_request(chat(), [1], model_assets).sampling.temperature == default
    assert generation_request(chat(temperature=0.3), [1], model_assets).sampling.temperature == 0.3


@pytest.mark.parametrize(("model", "adapter"), [("m:sql", "sql"), ("m", ""), ("m:other", ""), (None, "")])
def test_the_adapter_in_a_models_name_reaches_the_leader(model: str | None, adapter: str) -> None:
    model_assets = assets(adapters=["sql"])
    assert generation_request(chat(model=model), [1], model_assets).sampling.adapter == adapter
