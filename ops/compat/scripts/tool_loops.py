"""Tool loops of two turns: each answer is sent back as the client made it, with the results of its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checks import ROUNDS, TURNS

RESULT = "sunny"


def chat_loop(ask: Callable[[list[Any]], Any]) -> None:
    """`ask` sends a chat's messages and returns the answer's. Raises AssertionError where no tool is ever called."""
    said: list[Any] = []
    called = False
    for turn in TURNS:
        said.append({"role": "user", "content": turn})
        for _ in range(ROUNDS):
            message = ask(said)
            calls = message.tool_calls or []
            said += [message, *({"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in calls)]
            if not calls:
                break
            called = True
        assert message.content and not calls, said
    assert called, said


def messages_loop(ask: Callable[[list[Any]], Any]) -> None:
    """As `chat_loop`, with the messages and the answer of Anthropic's client."""
    said: list[Any] = []
    called = False
    for turn in TURNS:
        said.append({"role": "user", "content": turn})
        for _ in range(ROUNDS):
            answer = ask(said)
            said.append({"role": "assistant", "content": answer.content})
            used = [block.id for block in answer.content if block.type == "tool_use"]
            if not used:
                break
            results = [{"type": "tool_result", "tool_use_id": identity, "content": RESULT} for identity in used]
            said.append({"role": "user", "content": results})
            called = True
        assert answer.content[-1].text, said
    assert called, said


def langchain_loop(model: Any) -> None:
    """As `chat_loop`, with a chat model of LangChain: the answers are sent back as LangChain made them."""
    from langchain_core.messages import HumanMessage, ToolMessage  # only here: other clients don't have it

    def get_weather(city: str) -> str:
        """The weather in a city."""
        return RESULT

    able = model.bind_tools([get_weather])
    said: list[Any] = []
    for turn in TURNS:
        said.append(HumanMessage(turn))
        for _ in range(ROUNDS):
            answer = able.invoke(said)
            said.append(answer)
            said += [ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
            if not answer.tool_calls:
                break
        assert answer.content, said
    assert any(isinstance(message, ToolMessage) for message in said), said
