"""Where a grammar begins: with the text, or behind a reasoning that the prompt has begun."""

from __future__ import annotations

import pytest

from api.chat.constraining import constrained
from api.chat.reading.how import Calling, Reading, Thinking
from api.chat.tokens import Vocabulary
from control.errors import RequestError
from tests.leader import byte_assets, byte_tokenizer

BEGUN = Reading(thinking=Thinking(begun=True), calling=Calling("hermes"), marks={7: "<x>"})


def vocabulary(*markers: str) -> Vocabulary:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(markers))
    return Vocabulary(byte_assets(tokenizer_json=tokenizer.to_str()))


def test_the_text_is_the_grammars_alone() -> None:
    """Neither calls nor a reasoning that the model might begin are looked for in it."""
    for reading in (None, Reading(calling=Calling("hermes")), Reading(thinking=Thinking())):
        assert constrained(reading, "p", vocabulary()) == (None, None)


def test_a_reasoning_that_the_prompt_has_begun_is_ended_first() -> None:
    """The grammar begins behind the token that ends it, which may be a special one."""
    known = vocabulary("<think>", "</think>")
    expected = Reading(thinking=BEGUN.thinking, marks=BEGUN.marks), known.tokenizer.token_to_id("</think>")
    assert constrained(BEGUN, "p", known) == expected


def test_where_its_end_is_no_token_the_request_is_refused() -> None:
    """The grammar's beginning could not be told; the error names the parameter and the remedy."""
    with pytest.raises(RequestError, match="reasoning_effort") as caught:
        constrained(BEGUN, "guided_json", vocabulary())
    assert caught.value.param == "guided_json"
