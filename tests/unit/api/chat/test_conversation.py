"""A chat becomes a prompt in its model's form; and says how the answer is to be read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken

from api.chat.conversation import ChatPrompt, chat_prompt, fitted
from api.chat.forms import Forms, forms_of
from api.chat.template import MeteredTemplate
from api.chat.tokens import Vocabulary
from api.schemas.chat import parse_chat
from api.schemas.view import CallFormat, Calling, ThinkingMarks
from control.errors import RequestError, TemplateFailed
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
        (TEMPLATE, (), Forms("hermes", ThinkingMarks())),
        ("{{ tools }}<tool_call><function=f><parameter=p>", (), Forms("qwen_xml")),
        ("{{ tools }} Environment: ipython", (), Forms("llama3")),
        ("{{ tools }}", ("<|python_tag|>",), Forms("llama3")),
        ("{{ tools }}", (), Forms()),
        (BEGUN, (), Forms(None, ThinkingMarks())),
        (PLAIN, ("[THINK]", "[/THINK]"), Forms(None, ThinkingMarks("[THINK]", "[/THINK]"))),
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
    assert begun is not None and begun.thinking == ThinkingMarks(begun=True)
    assert free is not None and free.thinking == ThinkingMarks()
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
    prompt_text = chat_prompt(
        body, byte_assets(chat_template=TEMPLATE), MeteredTemplate(TEMPLATE), vocabulary(), Forms(form)
    )
    assert prompt_text.reading is not None and prompt_text.reading.calling == expected


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


def test_an_effort_that_no_template_knows() -> None:
    """It is refused by name where the template takes efforts."""
    with pytest.raises(RequestError) as caught:
        prompt("{{ reasoning_effort }}", reasoning_effort="colossal")
    assert caught.value.param == "reasoning_effort"


CHATML = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
NO_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}"
    "{% endif %}<{{ message.role }}>{{ message.content }}{% endfor %}"
)
DROPS_SYSTEM = (
    "{% for message in messages if message.role != 'system' %}<{{ message.role }}>{{ message.content }}{% endfor %}"
)
DEEPSEEK_V31 = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>{% endfor %}{% endfor %}"
)
CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
LOOP: list[Any] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "d"}]},
    {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    {"role": "tool", "tool_call_id": "d", "content": "dry"},
    {"role": "user", "content": "y"},
]
WRITTEN = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools_are_described_where_the_template_takes_none(choice: Any) -> None:
    """In the system message, after the client's own text. Calls are read as plain JSON, and forced where demanded."""
    said = {"role": "user", "content": "x"}
    prompt_text = prompt(
        CHATML, messages=[{"role": "system", "content": "Be brief."}, said], tools=[WEATHER], tool_choice=choice
    )
    assert prompt_text.text.startswith(
        "<system>Be brief.\n\nYou can call these functions."
    ) and prompt_text.text.endswith("<user>x")
    assert (
        "\n\n### get_weather\nDescription: " in prompt_text.text
        and '\nParameters: {"type": "object"' in prompt_text.text
    )
    assert '\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n' in prompt_text.text
    assert prompt_text.reading is not None and prompt_text.reading.calling is not None
    assert (prompt_text.reading.calling.format, prompt_text.reading.calling.names) == ("plain", ["get_weather"])
    assert (prompt_text.constraint is not None) == (choice != "auto")
    [(text, param)] = prompt_text.warnings
    assert "takes no tools" in text and "'plain'" in text and len(text) <= 200 and param == "tools"


def test_tools_are_not_described_where_nothing_is_to_be_called() -> None:
    """`none`, and a template that takes tools."""
    assert prompt(CHATML, tools=[WEATHER], tool_choice="none").text == "<user>x"
    assert "You can call" not in prompt(CHATML + "{{ tools | length }}", tools=[WEATHER]).text


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM])
def test_tools_stand_before_the_user_s_text_where_the_template_takes_no_system_message(template: str) -> None:
    """One that refuses it, and one that leaves it out."""
    text = prompt(template, tools=[WEATHER]).text
    assert text.startswith("<user>You can call these functions.") and text.endswith("\n\nx")


def test_a_described_form_is_the_model_s_own_where_it_has_one() -> None:
    """A template that writes calls and takes no tools, as DeepSeek V3.1's."""
    prompt_text = prompt(DEEPSEEK_V31, tools=[WEATHER])
    assert '<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"PARAMETER": "VALUE"}<｜tool▁call▁end｜>' in prompt_text.text
    assert prompt_text.reading is not None and prompt_text.reading.calling is not None
    assert prompt_text.reading.calling.format == "deepseek_v31" and "'deepseek_v31'" in prompt_text.warnings[0][0]


@pytest.mark.parametrize("template", [CHATML, NO_SYSTEM])
@pytest.mark.parametrize("tools", [{}, {"tools": [WEATHER]}])
def test_a_loop_where_the_template_knows_no_calls(template: str, tools: dict[str, Any]) -> None:
    """Calls are the text that the model wrote, their results are one turn of the user with what the user says next."""
    text = prompt(template, messages=LOOP, **tools).text
    turns = f"x<assistant>{WRITTEN}\n{WRITTEN}<user>Result of get_weather:\nsunny\n\nResult of get_weather:\ndry\n\ny"
    assert text.endswith(turns)


@pytest.mark.parametrize(
    "calls",
    [
        # As DeepSeek R1's and Functionary's: text beside a text that is missing.
        "{% if message.content is none %}{% for call in message.tool_calls %}"
        "{{ call.function.name + ' ' + call.function.arguments }};{% endfor %}{% endif %}",
        # As Ministral's: a content that is none, or has a length.
        "{% if message.content is none or message.content == '' %}{% endif %}{% if message.content | length == 0 %}"
        "{% for call in message.tool_calls %}{{ call.function.name }} {{ call.function.arguments | tojson }};"
        "{% endfor %}{% endif %}",
    ],
)
def test_calls_are_rendered_as_the_template_takes_them(calls: str) -> None:
    """Arguments as a mapping or as text, a missing content as none or as no text; what fails is tried otherwise."""
    template = (
        "{{ tools | length }}{% for message in messages %}{% if message.tool_calls %}" + calls + "{% else %}"
        "<{{ message.role }}>{{ message.content }}{% endif %}{% endfor %}"
    )
    written = 'get_weather {"city": "Oslo"};' * 2
    assert prompt(template, messages=LOOP, tools=[WEATHER]).text == f"1<user>x{written}<tool>sunny<tool>dry<user>y"


def test_a_template_that_fails_on_all_versions_says_what_it_said_first() -> None:
    with pytest.raises(TemplateFailed, match="first"):
        prompt("{{ tools }}{{ raise_exception('first') }}{{ messages[1].tool_calls }}", messages=LOOP, tools=[WEATHER])


@pytest.mark.parametrize("tools", [{}, {"tools": [WEATHER]}])
def test_a_prompt_that_begins_the_answer_s_mark(tools: dict[str, Any]) -> None:
    """As Functionary 3.2's, with tools and without; not one that goes on with a text."""
    template = (
        "{{ tools }}{% for message in messages %}{% if message.role == 'assistant' %}{{ '>>>all\\n' }}{% endif %}"
        "{{ message.content }}{% endfor %}{% if add_generation_prompt %}{{ '>>>' }}{% endif %}"
    )
    prompt_text = prompt(template, **tools)
    assert (
        prompt_text.text.endswith("x>>>") and prompt_text.reading is not None and prompt_text.reading.prompted == ">>>"
    )
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y >>>"}]
    continued = prompt(template, messages=messages, continue_final_message=True, add_generation_prompt=False, **tools)
    assert continued.text.endswith("y >>>") and continued.reading is not None and continued.reading.prompted == ""


def test_a_template_that_takes_functions_as_text() -> None:
    """As FireFunction 2's, which also wants the time; both are there without tools too."""
    template = (
        "{{ functions + ' on ' + datetime }}{% for message in messages %}{{ message.content }}{% endfor %}functools["
    )
    prompt_text = prompt(template, tools=[WEATHER], chat_template_kwargs={"datetime": "Monday"})
    assert json.loads(prompt_text.text.partition(" on ")[0])[0]["name"] == "get_weather"
    assert prompt_text.text.endswith(" on Mondayxfunctools[") and prompt_text.warnings == []
    assert prompt_text.reading is not None and prompt_text.reading.calling == Calling("functools")
    assert prompt(template).text.startswith("[] on 20")


def test_one_call_is_described_where_one_is_wanted() -> None:
    """`parallel_tool_calls: false`."""
    several, one = (prompt(CHATML, tools=[WEATHER], parallel_tool_calls=parallel).text for parallel in (True, False))
    assert "Several calls" in several and several.count("NAME") == 3
    assert "Call one function at a time." in one and one.count("NAME") == 1


def test_images_stay_where_results_become_turns_of_the_user() -> None:
    """A result, or what the user says next, may be a list of parts."""
    picture: list[Any] = [{"type": "image"}, {"type": "text", "text": "z"}]
    result = {"role": "tool", "tool_call_id": "c", "name": "f", "content": picture}
    [turn] = fitted([result, {"role": "user", "content": "y"}], None, "", takes_tools=False)
    assert turn["role"] == "user"
    assert turn["content"] == [{"type": "text", "text": "Result of f:"}, *picture, {"type": "text", "text": "y"}]


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
