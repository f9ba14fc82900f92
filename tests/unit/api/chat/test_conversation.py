"""A chat request becomes a prompt in its model's own form, and says how the answer is to be read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken

from api.chat.conversation import ChatPrompt, chat_prompt
from api.chat.forms import Forms, forms_of
from api.chat.template import MeteredTemplate
from api.chat.tokens import Vocabulary
from api.schemas.chat import parse_chat
from api.schemas.view import CallFormat, Calling, Thinking
from control.errors import RequestError
from tests.byte_model import byte_assets, byte_tokenizer
from tests.integration.api.calling import TEMPLATE, TIME, WEATHER

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
BEGUN = PLAIN + "{{ '<think>\\n' }}"


def vocabulary(special: bool = False, *texts: str) -> Vocabulary:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=special) for text in texts])
    return Vocabulary(byte_assets(tokenizer_json=tokenizer.to_str()))


def prompt(template: str, known: Vocabulary | None = None, **fields: Any) -> ChatPrompt:
    body = {"messages": [{"role": "user", "content": "x"}]} | fields
    known = known or vocabulary()
    assets = byte_assets(chat_template=template)
    forms = forms_of(template, known)
    return chat_prompt(parse_chat(msgspec.json.encode(body)), assets, MeteredTemplate(template), known, forms)


@pytest.mark.parametrize(
    ("template", "texts", "expected"),
    [
        (PLAIN, (), Forms()),
        (TEMPLATE, (), Forms("hermes", Thinking())),
        ("{{ tools }}<tool_call><function=f><parameter=p>", (), Forms("qwen_xml")),
        ("{{ tools }} Environment: ipython", (), Forms("llama3")),
        ("{{ tools }}", ("<|python_tag|>",), Forms("llama3")),
        ("{{ tools }}", (), Forms()),
        (BEGUN, (), Forms(None, Thinking())),
        (PLAIN, ("[THINK]", "[/THINK]"), Forms(None, Thinking("[THINK]", "[/THINK]"))),
    ],
)
def test_the_form_is_told_by_the_template(template: str, texts: tuple[str, ...], expected: Forms) -> None:
    """Calls and reasoning are read as the template writes them; some marks only the tokenizer knows."""
    assert forms_of(template, vocabulary(True, *texts)) == expected


def test_a_form_may_be_given() -> None:
    """An operator's word goes before the template's."""
    assert forms_of(TEMPLATE, vocabulary(), "qwen_xml").calls == "qwen_xml"


def test_reasoning_that_the_prompt_has_begun() -> None:
    """A prompt that ends with the opening mark means an answer that begins inside the reasoning."""
    begun, free = prompt(BEGUN).reading, prompt(TEMPLATE).reading
    assert begun is not None and begun.thinking == Thinking(begun=True)
    assert free is not None and free.thinking == Thinking()
    assert prompt(PLAIN).reading is None


def test_marks_are_the_special_tokens_of_the_form() -> None:
    """A mark whose text is skipped when tokens are decoded is known by its id; one that is plain text is not."""
    hidden = vocabulary(True, "<tool_call>", "<think>", "<other>")
    reading = prompt(TEMPLATE, hidden, tools=[WEATHER]).reading
    assert reading is not None
    assert reading.marks == {hidden.tokenizer.token_to_id(text): text for text in ("<think>", "<tool_call>")}
    shown = prompt(TEMPLATE, vocabulary(False, "<tool_call>", "<think>"), tools=[WEATHER]).reading
    assert shown is not None and shown.marks == {}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("hermes", Calling("hermes")),
        ("llama3", Calling("llama3", names=["get_weather", "get_time"])),
        ("qwen_xml", Calling("qwen_xml", literal={"get_weather": ["days"]})),
    ],
)
def test_what_a_form_needs_of_the_tools(form: CallFormat, expected: Calling) -> None:
    """Only a form that needs names or types keeps them with the request."""
    body = parse_chat(msgspec.json.encode({"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER, TIME]}))
    found = chat_prompt(body, byte_assets(chat_template=TEMPLATE), MeteredTemplate(TEMPLATE), vocabulary(), Forms(form))
    assert found.reading is not None and found.reading.calling == expected


def test_effort_in_the_words_of_the_template() -> None:
    """The effort itself where the template takes it, else a switch."""
    template = PLAIN + "{{ reasoning_effort }}{{ thinking }}"
    assert prompt(template, reasoning_effort="low").text == "xlowTrue"
    assert prompt(template, reasoning_effort="none", chat_template_kwargs={"thinking": 1}).text == "xnone1"


def test_effort_in_words_that_the_model_knows() -> None:
    """gpt-oss was trained on three; the others mean the nearest one."""
    template = PLAIN + "<|start|><|channel|>analysis<|message|>{{ reasoning_effort }}"
    for effort, word in {"none": "low", "minimal": "low", "medium": "medium", "max": "high"}.items():
        assert prompt(template, reasoning_effort=effort).text.endswith(word)


def test_without_a_switch_effort_is_a_hint() -> None:
    """A template without the words is rendered as ever, whatever effort is asked for."""
    for template in (PLAIN, BEGUN):
        plain = prompt(template).text
        for effort in ("low", "none", "colossal"):
            assert prompt(template, reasoning_effort=effort).text == plain
        assert prompt(template, enable_thinking=False, thinking={"type": "disabled"}).text == plain


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"enable_thinking": True}, "True"),
        ({"enable_thinking": False}, "False"),
        ({"thinking": False}, "False"),
        ({"thinking": {"type": "disabled"}}, "False"),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, "True"),
        ({"thinking": {"type": "auto"}}, ""),
        ({"reasoning_effort": "none", "enable_thinking": True}, "True"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "False"),
    ],
)
def test_the_switch_of_reasoning_at_the_top_of_the_body(fields: dict[str, Any], thinks: str) -> None:
    """As at Qwen, GLM and DeepSeek; a variable that is given by its name goes before it."""
    assert prompt(PLAIN + "{{ enable_thinking }}", **fields).text == "x" + thinks


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        (PLAIN, {"tools": [WEATHER]}, "tools"),
        ("{{ reasoning_effort }}", {"reasoning_effort": "colossal"}, "reasoning_effort"),
        (
            PLAIN,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                    }
                ]
            },
            "messages[0].tool_calls",
        ),
    ],
)
def test_what_a_template_can_not_say(template: str, fields: dict[str, Any], param: str) -> None:
    """It is refused by name rather than left out."""
    with pytest.raises(RequestError) as caught:
        prompt(template, **fields)
    assert caught.value.param == param


def test_tools_of_a_model_whose_form_is_not_known() -> None:
    """A call that is demanded is plain JSON, else the answer is text; both with a warning, and the tools are shown."""
    template = PLAIN + "{{ tools | length }}"
    free = prompt(template, tools=[WEATHER])
    assert (free.text, free.reading, free.constraint) == ("x1", None, None)
    demanded = prompt(template, tools=[WEATHER], tool_choice="required")
    assert demanded.text == "x1" and demanded.constraint is not None and demanded.constraint.param == "tools"
    assert demanded.reading is not None and demanded.reading.calling == Calling("plain", names=["get_weather"])
    for found in (free, demanded):
        [(text, param)] = found.warnings
        assert "calls of this model are not understood" in text and len(text) <= 200 and param == "tools"
    assert prompt(TEMPLATE, tools=[WEATHER]).warnings == []


def test_arguments_that_are_no_object_are_shown_as_they_are() -> None:
    """A model's own broken arguments, sent back as history, don't end the conversation."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "r"}]},
    ]
    template = (
        "{% for message in messages %}{{ message.name }}{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert prompt(template, messages=messages).text == '{"a": fr'
