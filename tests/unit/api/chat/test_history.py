"""A conversation is fitted to its template: ids, one call a message, names of reasoning, calls as text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from api.chat.conversation import fitted, rendered_version, rendered_with_tools, say_switch
from api.chat.reading.table import TABLE
from control.errors import TemplateFailed

Messages = list[dict[str, Any]]


def call(call_id: str, name: str = "f", **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls: dict[str, Any], content: str = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)} | fields


def result(call_id: str, content: str = "r") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content, "name": "f"}


def fit(form: str | None, *messages: dict[str, Any], source: str = "{{ tool_calls }}") -> Messages:
    return fitted(list(messages), None if form is None else TABLE[form], source, takes_tools=True)


@pytest.mark.parametrize("form", ["mistral_list", "mistral_ids", "mistral_args"])
def test_mistral_s_ids(form: str) -> None:
    """Nine letters and digits; one that fits stays, and a result has its call's id."""
    first, one, two, other = fit(
        form, assistant(call("call_1"), call("abcDEF123")), result("call_1"), result("abcDEF123"), result("gone")
    )
    ids = [one["id"] for one in first["tool_calls"]]
    assert ids[1] == "abcDEF123" and [one["tool_call_id"], two["tool_call_id"]] == ids
    assert all(len(text) == 9 and text.isalnum() for text in (*ids, other["tool_call_id"]))
    assert fit(form, assistant(call("call_1")))[0]["tool_calls"][0]["id"] == ids[0]


def test_kimi_s_ids_are_numbered_through_the_conversation() -> None:
    messages = fit(
        "kimi", assistant(call("a"), call("b", "g")), result("a"), result("b"), assistant(call("c")), result("c")
    )
    assert [one["id"] for message in messages for one in message.get("tool_calls", ())] == [
        "functions.f:0",
        "functions.g:1",
        "functions.f:2",
    ]
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == [
        "functions.f:0",
        "functions.g:1",
        "functions.f:2",
    ]


def test_other_forms_keep_ids() -> None:
    for form in ("hermes", "glm", None):
        assert fit(form, assistant(call("call_1")), result("call_1"))[1]["tool_call_id"] == "call_1"


@pytest.mark.parametrize("form", ["harmony", "llama3"])
def test_one_call_a_message(form: str) -> None:
    """Each call is followed by its own results; no result is lost."""
    messages = fit(
        form,
        assistant(call("a"), call("b"), content="x"),
        result("b", "2"),
        result("a", "1"),
        result("c", "3"),
        {"role": "user", "content": "y"},
    )
    shown = [(message["content"], [one["id"] for one in message.get("tool_calls", ())]) for message in messages]
    assert shown == [("x", ["a"]), ("1", []), ("", ["b"]), ("2", []), ("3", []), ("y", [])]


def test_reasoning_has_the_names_that_the_template_reads() -> None:
    message = {"role": "assistant", "content": "x", "reasoning_content": "so"}
    assert fit(None, dict(message), source="{{ message.thinking }}{{ message['thought'] }}")[0] == message | {
        "thinking": "so",
        "thought": "so",
    }
    assert fit(None, dict(message), source="{{ message.thinking_budget }}")[0] == message


@pytest.mark.parametrize("thinks", [True, False, None])
def test_a_word_of_the_system_prompt_switches_reasoning(thinks: bool | None) -> None:
    """Where the template reads the word; it is said once."""
    source = "{% if '/no_think' in message.content or '/think' in message.content %}"
    word = {True: ["/think"], False: ["/no_think"], None: []}[thinks]
    user = {"role": "user", "content": "x"}
    for before in ([], [{"role": "system", "content": "Be brief."}]):
        expected = [*" ".join(one["content"] for one in before).split(), *word]
        messages: Messages = [*before, dict(user)]
        say_switch(messages, thinks, source)
        say_switch(messages, thinks, source)
        said = " ".join(message["content"] for message in messages if message["role"] == "system").split()
        assert said == expected
        say_switch(other := [dict(user)], thinks, "{{ messages }}")
        assert other == [user]


def test_harmony_takes_text_or_reasoning_beside_a_call() -> None:
    source = "{{ message.thinking }}{{ tool_calls }}"
    [message] = fit("harmony", assistant(call("a"), content="Look.", reasoning_content="so"), source=source)
    assert (message["thinking"], message["content"]) == ("so\n\nLook.", "")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("lfm2", '<|tool_call_start|>[f(city="Oslo", days=2)]<|tool_call_end|>'),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"city": "Oslo", "days": 2}}]'),
        ("glm", "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
         "<arg_value>2</arg_value>\n</tool_call>"),
    ],
)  # fmt: skip
def test_calls_that_a_template_leaves_out_are_written(form: str, text: str) -> None:
    """Behind the content, as the model wrote them; a template that knows calls gets none as text."""
    message = assistant(call("a", city="Oslo", days=2), content="I look.")
    assert fit(form, dict(message), source="{{ message.content }}")[0]["content"] == f"I look.\n{text}"
    assert fit(form, dict(message))[0]["content"] == "I look."


def test_a_message_of_calls_alone_has_no_content_where_a_template_asks() -> None:
    source = "{% if message['content'] is none %}{{ tool_calls }}{% endif %}"
    assert fit("hermes", assistant(call("a")), source=source)[0]["content"] is None
    assert fit("hermes", assistant(call("a")))[0]["content"] == ""


class Strict:
    """A template that takes some messages only, and counts how often it is rendered."""

    def __init__(self, takes: Callable[[dict[str, Any]], bool]) -> None:
        self.takes, self.rendered = takes, 0

    def __call__(self, messages: Messages) -> str:
        self.rendered += 1
        if not all(self.takes(message) for message in messages):
            raise TemplateFailed("refused", param="messages", code="template_failed")
        return "\n".join(str(message["content"]) for message in messages)

    def cost(self, messages: Messages, accepted: dict[str, int]) -> int:
        """Renderings of one conversation, whatever becomes of it."""
        self.rendered = 0
        with suppress(TemplateFailed):
            rendered_version(messages, accepted, self)
        return self.rendered


def arguments_are_text(message: dict[str, Any]) -> bool:
    calls = message.get("tool_calls", ())
    return all(isinstance(one["function"]["arguments"], str) for one in calls)


@pytest.mark.parametrize(
    ("takes", "content", "first"),
    [
        (lambda message: True, None, 1),
        (arguments_are_text, "", 2),
        (arguments_are_text, None, 2),
        (lambda message: message["content"] is not None, None, 3),
    ],
)
def test_the_version_that_a_template_takes_is_known_after_the_first_conversation(
    takes: Callable[[dict[str, Any]], bool], content: str | None, first: int
) -> None:
    """Later ones are rendered once, and those that it refuses twice at most."""
    template, accepted = Strict(takes), dict[str, int]()
    messages = [assistant(call("a")) | {"content": content}, result("a")]
    assert [template.cost(messages, accepted) for _ in range(3)] == [first, 1, 1]
    template.takes = lambda message: message["role"] != "assistant"
    assert template.cost(messages, accepted) == 2
    template.takes = takes
    assert template.cost(messages, accepted) == 1


def test_one_conversation_does_not_change_the_version_of_others() -> None:
    """A template that takes messages as they are gets them so, though another version helped once."""
    template, accepted = Strict(lambda message: True), dict[str, int]()
    messages = [assistant(call("a")), result("a")]
    template.cost(messages, accepted)
    template.takes = arguments_are_text
    assert template.cost(messages, accepted) == 2
    template.takes = lambda message: True
    assert template.cost(messages, accepted) == 1 and set(accepted.values()) == {0}


@pytest.mark.parametrize("refuses", [True, False])
def test_the_place_of_described_tools_is_known_after_the_first_conversation(refuses: bool) -> None:
    """Whether the template refuses system messages or leaves them out, the second conversation is rendered once."""
    rendered: list[Messages] = []

    def render(messages: Messages) -> str:
        rendered.append(messages)
        if refuses and messages[0]["role"] == "system":
            raise TemplateFailed("refused", param="messages", code="template_failed")
        return "\n".join(message["content"] for message in messages if message["role"] != "system")

    accepted: dict[str, int] = {}
    for _ in range(2):
        assert rendered_with_tools([{"role": "user", "content": "hi"}], "TOOLS", accepted, render) == "TOOLS\n\nhi"
    assert [one[0]["role"] for one in rendered] == ["system", "user", "user"]
