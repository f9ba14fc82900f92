"""A conversation as a template wants it: ids, the names of reasoning, one call at a time; calls, results and tools as
text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from api.chat.forms import PLAIN
from api.chat.reading.calls import call_id
from api.chat.reading.form import CallForm, Form, Ids
from api.chat.reading.table import TABLE
from api.chat.reading.writing import written_calls
from api.schemas.chat import Offer
from control.errors import TemplateFailed

Messages = list[dict[str, Any]]

_NINE = re.compile(r"[A-Za-z0-9]{9}")
_NONE = re.compile(r"\bcontent(?:['\"]\])? is (?:not )?none")
"""The test by which a template recognises a message without content, as one with calls alone is."""
_REASONING = ("thinking", "thought", "tool_plan")
"""Names under which templates read the reasoning, besides `reasoning_content`."""


_TOOLS = "described tools"
_IN_SYSTEM = 0
_IN_USER = 1
_TOOL_ROLE = re.compile(r"['\"]tool['\"]")
_DESCRIPTION = """\
You can call these functions. Their parameters are JSON schemas.

{functions}

To call a function, answer with the call alone, in this form, with a name from the list and without a code block:
{call}
{several} The next message then has the result. Where no function is needed, answer in plain text."""
_ONE_CALL = "Call one function at a time."
_SEVERAL_CALLS = "Several calls are written like this:\n{calls}\n"
_EXAMPLE = ("NAME", {"PARAMETER": "VALUE"})


def fitted(messages: Messages, form: Form | None, source: str, takes_tools: bool) -> Messages:
    """The messages for a template with this source; they are changed in place. `takes_tools`: the template has a
    variable for tools."""
    _name_reasoning(messages, source)
    if "tool_calls" in source and _NONE.search(source):
        for message in messages:
            message["content"] = message["content"] or (None if message.get("tool_calls") else message["content"])
    if form is not None and form.ids != "any":
        _fit_ids(messages, form.ids)
    if "tool_calls" not in source:
        _write_calls(messages, _calls_in_text(form))
        if not takes_tools and _TOOL_ROLE.search(source) is None:
            messages = _results_of_user(messages)
    elif form is not None and form.calls is not None and form.calls.alone:
        messages = _one_call_each(messages)
    if form is not None and form.channels is not None:
        _join_thoughts(messages)
    return messages


def described_tools(offer: Offer, form: Form | None) -> str:
    """A description of the tools, and of how a call is written, for a model whose template takes none."""
    calls = _calls_in_text(form)
    functions = [_described(tool["function"]) for tool in offer.for_template]
    several = _ONE_CALL
    if not (offer.single or calls.alone):
        several = _SEVERAL_CALLS.format(calls=written_calls(calls, [_EXAMPLE, _EXAMPLE]))
    call = written_calls(calls, [_EXAMPLE])
    return _DESCRIPTION.format(functions="\n\n".join(functions), call=call, several=several)


def _described(function: dict[str, Any]) -> str:
    """A function under a headline, not as JSON with its name: a model that repeats it would make a call."""
    lines = [f"### {function['name']}"]
    if function.get("description"):
        lines.append(f"Description: {function['description']}")
    lines.append(f"Parameters: {json.dumps(function.get('parameters') or {}, ensure_ascii=False)}")
    return "\n".join(lines)


def rendered_with_tools(
    messages: Messages, tools: str, accepted: dict[str, int], render: Callable[[Messages], str]
) -> str:
    """The prompt with a description of the tools: in the system message, or in the user's first one where the template
    refuses system messages or leaves them out. The place that was taken is noted in `accepted`. Raises
    TemplateFailed."""
    if accepted.get(_TOOLS) != _IN_USER:
        try:
            text = render(with_tools(messages, tools, "system"))
        except TemplateFailed:
            if _TOOLS in accepted:
                raise
        else:
            if tools in text:
                accepted[_TOOLS] = _IN_SYSTEM
                return text
    text = render(with_tools(messages, tools, "user"))
    accepted[_TOOLS] = _IN_USER
    return text


def with_tools(messages: Messages, tools: str, role: str) -> Messages:
    """The messages with a description of tools: at the end of the system message, which is added where there is none,
    or, of role "user", before the text of the first message of the user."""
    if role == "system":
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        rest = messages if system is None else messages[1:]
        return [{"role": "system", "content": _joined(system, tools) if system else tools}, *rest]
    at = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        return [*messages, {"role": "user", "content": tools}]
    first = messages[at] | {"content": _joined(tools, messages[at]["content"])}
    return [*messages[:at], first, *messages[at + 1 :]]


def say_switch(messages: Messages, thinks: bool | None, source: str) -> None:
    """Switch reasoning on or off by a word of the system prompt, where a template reads one."""
    word = "/think" if thinks else "/no_think"
    if thinks is None or word not in source:
        return
    if not messages or messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": word})
    elif isinstance(messages[0]["content"], str) and word not in messages[0]["content"]:
        messages[0]["content"] += f" {word}"


def rendered_version(messages: Messages, accepted: dict[str, int], render: Callable[[Messages], str]) -> str:
    """The prompt that `render` makes of the messages, or of the first version of them that it takes. The version is
    noted in `accepted` by the kind of conversation; a later one of that kind is tried with it and with one more, so
    that a template that fails costs two attempts. Raises the TemplateFailed of the first one."""
    kind, versions = _versions(messages)
    last = accepted.get(kind)
    order = list(range(len(versions))) if last is None else [last, int(last == 0)][: len(versions)]
    failure: TemplateFailed | None = None
    for version in order:
        try:
            text = render(versions[version]())
        except TemplateFailed as error:
            failure = failure or error
        else:
            if last != 0:  # one conversation that needs another version does not change it for the others
                accepted[kind] = version
            return text
    assert failure is not None
    raise failure


def _versions(messages: Messages) -> tuple[str, list[Callable[[], Messages]]]:
    """The kind of the conversation, and how to make its versions for templates that fail on some: as it is, with
    arguments as JSON text (DeepSeek R1, Functionary 3.2), and with text for a content that is None (Ministral 3)."""
    versions: list[Callable[[], Messages]] = [lambda: messages]
    calling = [message for message in messages if message.get("tool_calls")]
    if not calling:
        return "text", versions
    versions.append(lambda: [_with_text_arguments(message) for message in messages])
    if all(message["content"] is not None for message in calling):
        return "calls", versions
    versions.append(lambda: [message | {"content": message["content"] or ""} for message in messages])
    return "calls without content", versions


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": text}})
    return message | {"tool_calls": calls}


def _calls_in_text(form: Form | None) -> CallForm:
    """The form of calls that no template writes: the model's own, else plain JSON."""
    calls = form.calls if form is not None else None
    plain = TABLE[PLAIN].calls
    assert plain is not None
    return calls or plain


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


def _write_calls(messages: Messages, form: CallForm) -> None:
    """A template that leaves calls out gets them as the text that the model wrote."""
    number = 0
    for message in messages:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        if not calls or not isinstance(message["content"], str):
            continue
        text = written_calls(form, calls, number)
        message["content"] = f"{message['content']}\n{text}" if message["content"] else text
        number += len(calls)


def _results_of_user(messages: Messages) -> Messages:
    """Results as messages of the user, for a template that knows no role of tools. Many such templates demand that user
    and assistant take turns: results that stand together, and what the user says after them, are one message."""
    fitting: Messages = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            name = f" of {message['name']}" if message.get("name") else ""
            message = {"role": "user", "content": _joined(f"Result{name}:", message["content"], "\n")}
        if after_result and message["role"] == "user":
            fitting[-1]["content"] = _joined(fitting[-1]["content"], message["content"])
        else:
            fitting.append(message)
        after_result = is_result
    return fitting


def _joined(first: Any, second: Any, between: str = "\n\n") -> Any:
    """Two contents as one: text, or a list of parts where one of them is such a list."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


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
