"""`truncation: "auto"` drops the oldest items; and what was asked is answered."""

from __future__ import annotations

import itertools
from typing import Any

import openai
import pytest

from tests.byte_model import CONTEXT
from tests.leader import ScriptedLeader


def talk(turns: int, size: int) -> list[Any]:
    """So many questions and answers of `size` characters each, and a last question."""
    said = [{"role": role, "content": f"{turn}" * size} for turn in range(turns) for role in ("user", "assistant")]
    return [*said, {"role": "user", "content": "last"}]


def test_the_oldest_turns_go(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Instructions and the newest turns stay, with room for the answer; without the word it is a 400."""
    request_body: Any = {"model": "tiny", "instructions": "Be short.", "input": talk(9, 300), "max_output_tokens": 1000}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**request_body)
    assert refused.value.code == "context_length_exceeded"
    response = client.responses.create(**request_body, truncation="auto")
    assert (response.truncation, response.output_text) == ("auto", "you said last")
    prompt = leader.prompt()
    assert prompt.startswith(f"system: Be short.\nuser: {'5' * 300}\nassistant: {'5' * 300}\n")
    assert prompt.endswith("\nuser: last\n")
    assert leader.claimed[-1].params.sampling.max_tokens == 1000
    count = client.responses.input_tokens.count(
        **{name: request_body[name] for name in ("model", "instructions", "input")}, truncation="auto"
    )
    assert CONTEXT / 2 < count.input_tokens <= 3 / 4 * CONTEXT
    listed = list(itertools.islice(client.responses.input_items.list(response.id, limit=100), 100))
    assert len(listed) == 19, "what was sent is kept whole"


def test_what_fits_is_left_alone(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Without a limit of its own a prompt may take all but one token, as it may without truncation."""
    request_body: Any = {"model": "tiny", "input": talk(6, 330)}
    client.responses.create(**request_body)
    whole = leader.prompt()
    client.responses.create(**request_body, truncation="auto")
    assert leader.prompt() == whole


def test_a_conversation_that_grows(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """A chain of responses goes on beyond the context; what is too long by itself is still a 400."""
    last: str | None = None
    for turn in range(4):
        response = client.responses.create(
            model="tiny", input=f"{turn}" * 1500, previous_response_id=last, truncation="auto", max_output_tokens=1600
        )
        assert response.status == "completed"
        last = response.id
    assert leader.prompt() == f"user: {'3' * 1500}\n"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="tiny", input="x" * 5000, truncation="auto")
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
