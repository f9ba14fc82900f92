"""A farm with a scripted model: a tool loop, and an answer whose leader is killed."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from control.redis.connection import connect, run
from control.replicas.lease import holder, release_token
from ops.compat.scripted import ANSWER, FORMS, OrderedLeader, scripted_farm
from tests.servers import NEW, serving
from tests.waiting import until

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
LONG = " ".join(f"line {number}" for number in range(40))


def order(**what: Any) -> str:
    return f"[order:{base64.b64encode(msgspec.json.encode(what)).decode()}]"


@pytest.fixture(scope="module", params=FORMS)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Of a farm whose model writes in a form."""
    with (
        scripted_farm("demo", tmp_path_factory.mktemp("data"), form=request.param) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def said(client: openai.OpenAI, *messages: Any, **more: Any) -> ChatCompletionMessage:
    return client.chat.completions.create(model="demo", messages=list(messages), **more).choices[0].message


def test_a_tool_loop(client: openai.OpenAI) -> None:
    """A call where the tool is offered, the ordered text after its result, the next order after that."""
    ask = {"role": "user", "content": f"Add. {order(call={'name': 'add', 'arguments': {'a': 2}}, then='It is 5.')}"}
    assert said(client, ask).content == ANSWER
    [call] = (first := said(client, ask, tools=[TOOL])).tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 2}')
    turns = [ask, first, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    assert said(client, *turns, tools=[TOOL]).content == "It is 5."
    thanks = {"role": "user", "content": f"Thanks. {order(say='You are welcome.')}"}
    assert said(client, *turns, thanks, tools=[TOOL]).content == "You are welcome."


def test_an_answer_whose_leader_is_killed(client: openai.OpenAI) -> None:
    """The leader's process kills itself in the middle of the answer; the next one goes on with the same text."""
    ask: Any = {"role": "user", "content": order(say=LONG, dies=True)}
    chunks = list(client.chat.completions.create(model="demo", messages=[ask], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == LONG


def test_a_call_whose_leader_is_killed(client: openai.OpenAI) -> None:
    """In the middle of its marks, name or arguments: the call is the same, and no mark is text."""
    call = {"name": "add", "arguments": {"a": 2, "note": "x" * 20}}
    ask: Any = {"role": "user", "content": order(call=call, then="", dies=True)}
    chunks = list(client.chat.completions.create(model="demo", messages=[ask], tools=[TOOL], stream=True))
    text = name = arguments = ""
    for chunk in chunks:
        text += chunk.choices[0].delta.content or ""
        for part in chunk.choices[0].delta.tool_calls or []:
            assert part.function is not None
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert (text, name, msgspec.json.decode(arguments)) == ("", "add", call["arguments"])


def test_a_leader_whose_lock_is_lost_acquires_it_again() -> None:
    """Released under it, as an agent does, the lock is not renewed: the leader begins a new epoch and answers there."""
    with serving(NEW) as server, connect(server.url) as redis:
        stopping = threading.Event()
        leader = OrderedLeader(server.url, "demo")
        thread = threading.Thread(target=leader.lead, args=(stopping.is_set,))

        def token_after(token: str | None) -> str:
            now = until(lambda: None if (held := run(redis, holder("demo", "r0"))) == token else held)
            assert now is not None
            return now

        thread.start()
        try:
            first = token_after(None)
            assert run(redis, release_token("demo", "r0", first))
            second = token_after(first)
            assert run(redis, release_token("demo", "r0", second))
            assert token_after(second) != first
        finally:
            stopping.set()
            thread.join(20)
    assert not thread.is_alive()
