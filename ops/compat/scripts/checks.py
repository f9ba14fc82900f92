"""Checks of one client: run each, tell what came of it as a line of JSON. Knows nothing but the standard library."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import time
import traceback
import urllib.request
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any

BASE_URL = os.environ["COMPAT_BASE_URL"]
MODEL = os.environ["COMPAT_MODEL"]
KEY = os.environ["COMPAT_KEY"]
CLIENT = os.environ["COMPAT_CLIENT"]
"""The name of the client, for a script that drives several."""
SAMPLES = os.environ.get("COMPAT_SAMPLES", "")
FAULT_URL = os.environ.get("COMPAT_FAULT_URL", "")
"""A POST to its /pause stops the leader for 0.6 s, to its /kill kills it; empty where the run can't do that."""
SCRIPTED_URL = os.environ.get("COMPAT_SCRIPTED_URL", "")
"""The base URL of a farm whose model answers as `order` says; empty where there is none."""
FORM = os.environ.get("COMPAT_FORM", "")
"""The form in which that model writes, where the run is about this form: of all checks only ORDERED is run then."""
ATTEMPTS = 3
"""Streams of which one must be hit by the fault: a slow reader may see the beginning of an answer after its end."""
FAULTS = {"stopped leader": "pause", "killed leader": "kill"}
LOOP = "two turns and a tool loop, default settings"
ORDERED = "a tool call, its result, and a second turn"
"""The check of an agent on the model that takes orders."""
ASK: Any = [{"role": "user", "content": "What is a poisoned replica?"}]
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
"""The parameters of the tool `get_weather`."""
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
"""The tool, as chat completions have it."""
TURNS = ("What is the weather in Paris?", "What is 2 + 3?")
ROUNDS = 4
"""Answers that a turn may take: calls of tools, then the text."""
LONG = "Count from 1 to 60."
"""A question whose answer is long enough to be disturbed in its middle."""

_checks: dict[str, Callable[[], Any]] = {}


def check(title: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function, plain or async, that raises where the client or the server does not do as `title` says."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        _checks[title] = function
        return function

    return register


def undisturbed(name: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function that asks LONG and yields the answer's texts: each fault in its middle leaves it unchanged.

    Nothing is registered where the run has no faults.
    """

    def register(texts: Callable[[], Any]) -> Callable[[], Any]:
        for title, fault in FAULTS.items() if FAULT_URL else ():

            @check(f"{name}: {title}" if name else title)
            async def same(fault: str = fault) -> None:
                whole = "".join([text async for text in _each(texts())])
                for _ in range(ATTEMPTS):
                    answer, hit = await _disturbed(texts(), fault)
                    assert answer == whole, f"{answer!r} is not {whole!r}"
                    if hit:
                        return
                raise AssertionError("each answer had ended before the fault")

        return texts

    return register


async def _disturbed(texts: Any, fault: str) -> tuple[str, bool]:
    """The text of a stream with a fault in its middle; False where the stream did not wait for a leader after it."""
    answer = ""
    leader = 0
    at = 0.0
    async for text in _each(texts):
        answer += text
        if not leader and len(answer) > 5:
            leader = inject(fault)
            at = time.monotonic()
    if fault == "kill":
        return answer, inject("") != leader
    return answer, leader > 0 and time.monotonic() - at > 0.5


async def _each(texts: Iterable[str] | AsyncIterable[str]) -> Any:
    """Of a plain iterable or an asynchronous one."""
    if isinstance(texts, AsyncIterable):
        async for text in texts:
            yield text
    else:
        for text in texts:
            yield text


def inject(fault: str) -> int:
    """The pid of the leader that was stopped ("pause") or is dead ("kill"), or, of no fault, of today's.

    With "?busy" behind it the fault waits until the leader runs a request.
    """
    request = urllib.request.Request(f"{FAULT_URL}/{fault}", method="POST" if fault else "GET")
    with urllib.request.urlopen(request, timeout=90) as answer:
        return int(answer.read())


def terse() -> dict[str, int]:
    """A `logit_bias` under which a small model that must write JSON comes to its end."""
    return {str(_token(sign)): 100 if sign == '"' else 50 for sign in '"{}[],:'}


def _token(text: str) -> int:
    body = json.dumps({"model": MODEL, "prompt": text, "add_special_tokens": False}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{BASE_URL}/tokenize", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["tokens"][0]


def order(**what: Any) -> str:
    """An order to the scripted model (`ops/compat/scripted.py`) in a user's turn: `say`, or `call` and `then`."""
    return f"[order:{base64.b64encode(json.dumps(what).encode()).decode()}]"


def refused(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """The exception of that kind that `call` raises. Raises AssertionError where it returns instead."""
    try:
        answer = call()
    except kind as error:
        return error
    raise AssertionError(f"it was not refused: {answer}")


# --- tool loops of two turns ------------------------------------------------------------------------------------------

RESULT = "sunny"
Turn = tuple[list[Any], list[Any], Any]
"""One answer: its messages to send back as the client made them, the results of its calls, and its text."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def tool_loop(ask: Callable[[list[Any]], Turn], user: Callable[[str], Any] = user) -> None:
    """`ask` sends the messages so far. Raises AssertionError where no tool is ever called, or a turn has no text."""
    messages: list[Any] = []
    called = False
    for text in TURNS:
        messages.append(user(text))
        for _ in range(ROUNDS):
            answer, results, content = ask(messages)
            messages += [*answer, *results]
            if not results:
                break
            called = True
        assert content and not results, messages
    assert called, messages


def chat_loop(ask: Callable[[list[Any]], Any]) -> None:
    """`ask` sends a chat's messages and returns the answer's."""

    def turn(messages: list[Any]) -> Turn:
        message = ask(messages)
        calls = message.tool_calls or []
        results = [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in calls]
        return [message], results, message.content

    tool_loop(turn)


def messages_loop(ask: Callable[[list[Any]], Any]) -> None:
    """`ask` sends the messages of Anthropic's client and returns its answer."""

    def turn(messages: list[Any]) -> Turn:
        content = ask(messages).content
        calls = [block.id for block in content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": identity, "content": RESULT} for identity in calls]
        message = {"role": "assistant", "content": content}
        return [message], [{"role": "user", "content": results}] if calls else [], calls or content[-1].text

    tool_loop(turn)


def langchain_loop(model: Any) -> None:
    """With a chat model of LangChain."""
    from langchain_core.messages import HumanMessage, ToolMessage  # only here: other clients don't have it

    def get_weather(city: str) -> str:
        """The weather in a city."""
        return RESULT

    able = model.bind_tools([get_weather])

    def turn(messages: list[Any]) -> Turn:
        answer = able.invoke(messages)
        results = [ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
        return [answer], results, answer.content

    tool_loop(turn, HumanMessage)


# --- the program ------------------------------------------------------------------------------------------------------


def tell(title: str, ok: bool, detail: str = "") -> None:
    print(json.dumps({"check": title, "ok": ok, "detail": detail}), flush=True)


def main() -> None:
    """Run all checks in their order; of a run about a form those of ORDERED, under the name of the form."""
    of_form = {f"{FORM}: {title}": check for title, check in _checks.items() if title.endswith(ORDERED)}
    for title, function in (of_form if FORM else _checks).items():
        try:
            step = function()
            if inspect.iscoroutine(step):
                asyncio.run(step)
            tell(title, True)
        except Exception as error:
            line = next(
                (
                    frame.lineno
                    for frame in reversed(traceback.extract_tb(error.__traceback__))
                    if "scripts" in frame.filename
                ),
                0,
            )
            tell(title, False, f"{type(error).__name__}: {str(error)[:300]} (line {line})")
