"""A conversation as a family's template wants it: ids, the names of reasoning, one call at a time, calls as text."""

from __future__ import annotations

import re
from typing import Any

from api.chat.reading.calls import call_id
from api.chat.reading.form import Form, Ids
from api.chat.reading.writing import written_calls

Messages = list[dict[str, Any]]

_NINE = re.compile(r"[A-Za-z0-9]{9}")
_NONE = re.compile(r"\bcontent(?:['\"]\])? is (?:not )?none")
"""How a template asks for a message without content, which one with calls alone is."""
_REASONING = ("thinking", "thought", "tool_plan")
"""Names under which templates read the reasoning, besides `reasoning_content`."""


def fitted(messages: Messages, form: Form | None, source: str) -> Messages:
    """The messages for a template with this source; they are changed in place."""
    _name_reasoning(messages, source)
    if _NONE.search(source):
        for message in messages:
            message["content"] = message["content"] or (None if message.get("tool_calls") else message["content"])
    if form is None:
        return messages
    if form.ids != "any":
        _fit_ids(messages, form.ids)
    if form.calls is None:
        return messages
    if "tool_calls" not in source:
        _write_calls(messages, form)
    elif form.calls.alone:
        messages = _one_call_each(messages)
    if form.channels is not None:
        _join_thoughts(messages)
    return messages


def say_switch(messages: Messages, thinks: bool | None, source: str) -> None:
    """Switch reasoning on or off by a word of the system prompt, where a template reads one."""
    word = "/think" if thinks else "/no_think"
    if thinks is None or word not in source:
        return
    if not messages or messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": word})
    elif isinstance(messages[0]["content"], str) and word not in messages[0]["content"]:
        messages[0]["content"] += f" {word}"


def _name_reasoning(messages: Messages, source: str) -> None:
    names = [name for name in _REASONING if re.search(rf"\.{name}\b(?!\()|\[.{name}.\]", source)]
    for message in messages if names else []:
        if message.get("reasoning_content"):
            for name in names:
                message.setdefault(name, message["reasoning_content"])


def _fit_ids(messages: Messages, ids: Ids) -> None:
    """Give calls and results ids in the form that the template demands; calls keep those that fit."""
    fitting: dict[str, str] = {}
    number = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            own = call["id"]
            fits = ids == "nine" and _NINE.fullmatch(own) is not None
            fitting[own] = own if fits else call_id(ids, own, call["function"]["name"], number)
            call["id"] = fitting[own]
            number += 1
        if "tool_call_id" in message:
            own = message["tool_call_id"]
            fits = ids == "nine" and _NINE.fullmatch(own) is not None
            message["tool_call_id"] = fitting.get(own, own if fits else call_id(ids, own, message.get("name", ""), 0))


def _write_calls(messages: Messages, form: Form) -> None:
    """A template that leaves calls out gets them as the text that the model wrote."""
    number = 0
    assert form.calls is not None
    for message in messages:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        if not calls or not isinstance(message["content"], str):
            continue
        text = written_calls(form.calls, calls, number)
        message["content"] = f"{message['content']}\n{text}" if message["content"] else text
        number += len(calls)


def _one_call_each(messages: Messages) -> Messages:
    """Calls that were made together, one after the other: each is followed by its results."""
    fitting: Messages = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            fitting.append(message)
            continue
        results: Messages = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        for number, call in enumerate(calls):
            one = message if number == 0 else {"role": message["role"], "content": ""}
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            fitting += [one | {"tool_calls": [call]}, *own]
        ids = {call["id"] for call in calls}
        fitting += [result for result in results if result.get("tool_call_id") not in ids]
    return fitting


def _join_thoughts(messages: Messages) -> None:
    """Harmony's template takes text or reasoning beside a call, not both."""
    for message in messages:
        if message.get("tool_calls") and message["content"] and message.get("thinking"):
            message["thinking"] = f"{message['thinking']}\n\n{message['content']}"
            message["content"] = ""
