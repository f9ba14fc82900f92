"""Contents of a request are bounded: so much of each thing, and the refusal says which and how much."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from api.schemas.chat import parse_chat
from api.schemas.completions import parse_completion
from control.errors import RequestError

USER = {"role": "user", "content": "x"}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"messages": [USER]} | fields)


@pytest.mark.parametrize(
    ("most", "beyond", "param", "bound"),
    [
        ({"model": "m" * 512}, {"model": "m" * 513}, "model", "512"),
        ({"messages": [USER] * 4096}, {"messages": [USER] * 4097}, "messages", "4096 are"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4096}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2049}] * 2},
            "messages",
            "content parts",
        ),
        ({"stop": ["a", "b" * 1024]}, {"stop": ["a", "b" * 1025]}, "stop[1]", "1024"),
        ({"stop": ["a"] * 16}, {"stop": ["a"] * 17}, "stop", "16"),
        ({"bad_words": ["x"] * 1024}, {"bad_words": ["x"] * 100_000}, "bad_words", "1024 are"),
        ({"bad_words": ["x" * 1024]}, {"bad_words": ["y", "x" * 1_000_000]}, "bad_words[1]", "1024 are"),
        ({"bad_words": ["x" * 64] * 1024}, {"bad_words": ["x" * 65] * 1024}, "bad_words", "65536 are"),
        ({"bad_words": ["x"]}, {"bad_words": ["x", ""]}, "bad_words[1]", "empty"),
        ({"stop_token_ids": [1] * 1024}, {"stop_token_ids": [1] * 1025}, "stop_token_ids", "1024"),
        (
            {"logit_bias": {str(token): 1 for token in range(4096)}},
            {"logit_bias": {str(token): 1 for token in range(4097)}},
            "logit_bias",
            "4096",
        ),
        (
            {"chat_template_kwargs": {"a": nested(31)}},
            {"chat_template_kwargs": {"a": nested(32)}},
            "chat_template_kwargs",
            "32 levels",
        ),
        ({"n": 128}, {"n": 129}, "n", "128"),
    ],
)
def test_a_bound_passes_and_one_more_is_refused(
    most: dict[str, Any], beyond: dict[str, Any], param: str, bound: str
) -> None:
    """Exactly the bound passes; one more is a refusal that names field and bound."""
    parse_chat(body(**most))
    with pytest.raises(RequestError, match=bound) as refused:
        parse_chat(body(**beyond))
    assert refused.value.param == param


def test_choices_are_counted_for_each_prompt() -> None:
    """A list of prompts counts once for each of its choices."""
    parse_completion(msgspec.json.encode({"prompt": ["a"] * 32, "n": 4}))
    with pytest.raises(RequestError, match="more than 128 choices"):
        parse_completion(msgspec.json.encode({"prompt": ["a"] * 33, "n": 4}))


@pytest.mark.parametrize("field", ["chat_template_kwargs", "response_format", "user"])
def test_a_body_that_nests_without_end(field: str) -> None:
    """A body too deep for the decoder is the client's error."""
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    with pytest.raises(RequestError):
        parse_chat(b'{"messages":[{"role":"user","content":"x"}],"' + field.encode() + b'":' + deep + b"}")
