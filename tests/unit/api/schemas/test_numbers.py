"""Every number has a range: a refusal names the field, the value and the range."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import msgspec.inspect as inspect
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.generation.client_request import deadline_ms, on_disconnect_policy
from api.schemas.chat import ChatRequest, parse_chat
from api.schemas.completions import CompletionRequest, parse_completion
from api.schemas.farm import KeyToChange, KeyToCreate, ModelToLoad, ModelToScale
from api.schemas.items import Item
from api.schemas.messages import MessageRequest, Thinking, parse_message
from api.schemas.responses import ResponseRequest, conversation, parse_response
from control.access import mint
from control.bounds import FARM_NUMBERS, LONGEST_S, REQUEST_NUMBERS, Range
from control.errors import RequestError, SettingsError
from control.operations.spec import DEFAULTS, build_spec

Parse = Callable[[bytes], Any]

HELLO: list[Item] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}]
BEYOND = (-1, -1e17, 1e17, 1e308, 5e-324, 2**31, 2**53 + 1, 2**63, 2**64, 10**40, 10**400, True, False, "1", None)
OTHER_NAMES = {"index"}
"""Numbers of a message's parts, which are read and not used."""


def respond(body: bytes) -> Any:
    """As the route does: the body, then the chat request that it stands for."""
    return conversation(parse_response(body), HELLO, stored=True)


DIALECTS: dict[str, tuple[Parse, type, dict[str, Any]]] = {
    "chat": (parse_chat, ChatRequest, {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
    "completions": (parse_completion, CompletionRequest, {"prompt": "x"}),
    "responses": (respond, ResponseRequest, {"input": "x"}),
    "messages": (parse_message, MessageRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
}


def numeric(kind: type) -> Iterator[str]:
    """The fields of a struct that take a number, a mapping's values included."""
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    for field in described.fields:
        kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        kinds = tuple(one.value_type if isinstance(one, inspect.DictType) else one for one in kinds)
        if any(isinstance(one, (inspect.IntType, inspect.FloatType)) for one in kinds):
            yield field.encode_name


UNLIMITED = ("max_tokens", "max_completion_tokens", "max_output_tokens", "top_logprobs", "prompt_logprobs")
"""-1 is no limit, or all that is shown."""

CASES = [(name, field) for name, (_, kind, _) in DIALECTS.items() for field in numeric(kind)]


def body_with(dialect: str, field: str, value: Any) -> bytes:
    """A body whose `field` is `value`."""
    told = {"7": value} if field == "logit_bias" else value
    body = DIALECTS[dialect][2] | {field: told}
    return json.dumps(body).encode()


def test_every_number_has_a_range() -> None:
    """A new field that takes a number fails here until the table knows it."""
    asked = {field for _, field in CASES} | set(numeric(Thinking))
    assert asked - OTHER_NAMES <= set(REQUEST_NUMBERS)
    operators = {field for kind in (KeyToCreate, KeyToChange, ModelToLoad, ModelToScale) for field in numeric(kind)}
    assert operators - {"sampling"} == set(FARM_NUMBERS)
    assert set(DEFAULTS) <= set(REQUEST_NUMBERS), "the values of `sampling` have the ranges of requests"
    assert all(math.isfinite(known.most) and math.isfinite(known.least) for known in REQUEST_NUMBERS.values())


@pytest.mark.parametrize(("dialect", "field"), CASES)
def test_beyond_a_range_is_a_refusal_with_field_value_and_range(dialect: str, field: str) -> None:
    """One beyond each end of the range, and far beyond."""
    parse, known = DIALECTS[dialect][0], REQUEST_NUMBERS[field]
    if field in ("deadline", "on_disconnect"):
        return  # read by preparation.py: below
    below = known.least - 2 if field in UNLIMITED else known.least - 1  # -1 is no limit
    for value in (below, known.most + 1, -(2**70), 2**70):
        with pytest.raises(RequestError) as refused:
            parse(body_with(dialect, field, value))
        assert refused.value.param == field
        text = str(refused.value)
        assert f"'{field}'" in text and (str(value) in text or f"{float(value)!r}" in text), text
        assert str(known.most) in text, text


@settings(max_examples=400)
@given(
    case=st.sampled_from(CASES),
    value=st.one_of(st.sampled_from(BEYOND), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
)
def test_no_number_is_our_error(case: tuple[str, str], value: Any) -> None:
    """Whatever number a field holds, it is taken and encoded, or refused: nothing else is raised."""
    dialect, field = case
    try:
        request = DIALECTS[dialect][0](body_with(dialect, field, value))
        life = deadline_ms(request)
        policy = on_disconnect_policy(request.on_disconnect, None)
        msgspec.json.encode(request)
    except RequestError as error:
        assert error.param
    else:
        assert 0 <= life <= 1000 * LONGEST_S
        assert policy in ("cancel", "continue") or 0 <= int(policy) <= LONGEST_S


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e309", "-1e400", "1" + "0" * 5000])
@pytest.mark.parametrize("field", ["timeout", "temperature", "n", "seed", "on_disconnect", "max_tokens"])
def test_what_is_no_number_of_json(field: str, word: str) -> None:
    """A number that JSON or 64 bits can't hold is the client's error."""
    body = body_with("chat", field, "@").replace(b'"@"', word.encode())
    with pytest.raises(RequestError):
        parse_chat(body)


def test_a_request_lives_for_a_day_at_most() -> None:
    """`timeout`, `deadline` and `on_disconnect` are bounded alike, in the body and in the header."""
    fields: Any
    for fields in ({"timeout": LONGEST_S}, {"deadline": time.time() + LONGEST_S - 1}):
        assert deadline_ms(ChatRequest(messages=[], **fields)) <= 1000 * LONGEST_S
    with pytest.raises(RequestError, match=r"deadline.*day"):
        deadline_ms(ChatRequest(messages=[], deadline=time.time() + LONGEST_S + 9))
    for value in (LONGEST_S + 1, -1, 1e17, 2**63, 10**400, math.nan, math.inf, "nan", "inf", "1e999", "-1", "x" * 999):
        for field, header in ((value, None), (None, str(value)[:5000])):
            with pytest.raises(RequestError, match=str(LONGEST_S)) as refused:
                on_disconnect_policy(field, header)
            assert refused.value.param == "on_disconnect" and len(str(refused.value)) < 250
    assert on_disconnect_policy(0.2, None) == "1"


@pytest.mark.parametrize("name", ["rpm", "tpm", "max_concurrent", "expires"])
def test_a_key_s_numbers(name: str) -> None:
    """A limit or an expiry beyond its range makes no key."""
    given: Any
    for given in ({name: -1}, {name: 2**63}, {name: FARM_NUMBERS[name].most + 1}):
        with pytest.raises(SettingsError, match=name if name != "expires" else "expire"):
            mint(**given)


@pytest.mark.parametrize("name", ["tp", "replicas", "max_context", "kv_tokens", "drain_s"])
def test_a_model_s_numbers(name: str) -> None:
    """Neither `furrow models load` nor /farm takes a number of replicas that planning would never end with."""
    value: Any
    for value in (FARM_NUMBERS[name].least - 1, FARM_NUMBERS[name].most + 1, 2**70):
        with pytest.raises(SettingsError, match=f"'{name}'.*between"):
            build_spec("demo", **{name: value})


def test_the_words_of_a_range() -> None:
    """NaN lies in no range, and an open end says so."""
    assert not Range(0, 1).holds(math.nan)
    assert Range(0, 1).holds(0) and not Range(0, 1, above=True).holds(0)
    assert str(Range(0, 9, above=True)) == "above 0 and at most 9"
