"""Continued messages have transformers' prompt: one that ends within the last message; its answer is read from the
middle."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from api.chat.answer import PieceDecoder
from api.chat.conversation import ChatPrompt, chat_prompt
from api.chat.forms import forms_of
from api.chat.piece import Piece
from api.chat.template import MeteredTemplate
from api.chat.tokens import Vocabulary
from api.schemas.chat import parse_chat
from api.schemas.view import CallFormat, View
from control.errors import RequestError, TemplateFailed
from control.messages import LogEntry
from tests.byte_model import byte_assets
from tests.integration.api.calling import WEATHER

KEEPS = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TRIMS = KEEPS.replace("message.content", "message.content | trim")
REASONS = """\
{%- for message in messages %}
{%- set content = message.content %}{% set reasoning = message.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1] | trim %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
"""As Qwen's."""
BEGINS = KEEPS.replace(
    "{{ message.role }}\n", "{{ message.role }}\n{% if message.role == 'assistant' %}<think>{% endif %}"
)
TOOLS = KEEPS + "{% if tools %}<tool_call>{{ tools | length }}{% endif %}"
VOCABULARY = Vocabulary(byte_assets())


def prompt(template: str, content: Any, form: CallFormat | None = None, **fields: Any) -> ChatPrompt:
    last = {"role": "assistant", "content": content} | fields.pop("last", {})
    messages = [{"role": "user", "content": "x"}, last]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False} | fields
    assets = byte_assets(chat_template=template)
    forms = forms_of(template, VOCABULARY, form)
    return chat_prompt(parse_chat(msgspec.json.encode(body)), assets, MeteredTemplate(template), VOCABULARY, forms)


@pytest.mark.parametrize("template", [KEEPS, TRIMS, REASONS, BEGINS])
@pytest.mark.parametrize(
    "content",
    [
        "Hello",
        "Hello ",
        "Hello\n",
        " Hello",
        "CONTINUE_FINAL_MESSAGE_TAG is said",
        "<think>\nso\n</think>\n\nHello",
        "😀 ",
    ],
)
def test_the_prompt_is_that_of_transformers(template: str, content: str) -> None:
    """Cut after the content; where a template trims it, without the white space at its end."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
    expected, _ = render_jinja_template([messages], chat_template=template, continue_final_message=True)
    assert prompt(template, content).text == expected[0]


def test_an_answer_of_a_new_turn_or_none() -> None:
    """`add_generation_prompt` alone reaches the template."""
    body = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    assets = byte_assets(chat_template=KEEPS)
    forms = forms_of(KEEPS, VOCABULARY)
    prompt_text = chat_prompt(parse_chat(msgspec.json.encode(body)), assets, MeteredTemplate(KEEPS), VOCABULARY, forms)
    assert prompt_text.text == "<|im_start|>user\nx<|im_end|>\n"


def read(how: ChatPrompt, *texts: str) -> Piece:
    """The whole answer that says `texts`, byte by byte."""
    view = View(endpoint="chat", created=0, model="m", reading=how.reading)
    answer, whole = PieceDecoder(VOCABULARY, view, "rid"), Piece(0, 0)
    tokens = VOCABULARY.tokenizer.encode("".join(texts), add_special_tokens=False).ids
    for seq, token in enumerate(tokens, 1):
        whole.collect(answer.feed(LogEntry(seq, 0, token)))
    whole.collect(answer.feed(LogEntry(len(tokens) + 1, 0, 257, "stop", "token")))
    return whole


@pytest.mark.parametrize(
    ("template", "content", "said", "reasoning", "text"),
    [
        (REASONS, "Hello", " world", "", " world"),
        (REASONS, "", "<think>a</think>b", "", "<think>a</think>b"),
        (KEEPS + "{# <think> #}", "Hello", " <think>", "", " <think>"),
        (KEEPS + "{# <think> #}", "", "<think>a</think>b", "a", "b"),
        (KEEPS + "{# <think> #}", "<think>\nLet", " me</think>\n\nso", " me", "so"),
        (KEEPS + "{# <think> #}", "<think>\n", "Let me</think>so", "Let me", "so"),
        (KEEPS + "{# <think> #}", "<think>a</think>", "so", "", "so"),
        (KEEPS + "{# <think> #}", "Say <think>", "x", "", "x"),
        (BEGINS, "", "so</think>b", "so", "b"),
        (BEGINS, "Let", " me</think>b", " me", "b"),
        (BEGINS, "Let</think>a", " b", "", " b"),
    ],
)
def test_reasoning_is_told_from_the_place_where_the_message_ends(
    template: str, content: str, said: str, reasoning: str, text: str
) -> None:
    """Inside of it, before it or after it; white space of a continuation is kept."""
    pieces = read(prompt(template, content), said)
    assert (pieces.reasoning, pieces.text) == (reasoning, text)


CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
LLAMA = CALL.replace("arguments", "parameters")
XML = "<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("form", "content", "said", "text", "calls"),
    [
        ("hermes", "I", f" look.\n<tool_call>{CALL}</tool_call>", " look.", 1),
        ("hermes", f"I look.\n<tool_call>{CALL[:40]}", f"{CALL[40:]}</tool_call>", "", 1),
        ("hermes", "<tool_call>\n", f"{CALL}\n</tool_call>", "", 1),
        ("hermes", f"<tool_call>{CALL}</tool_call>", f"\n<tool_call>{CALL}</tool_call>", "", 1),
        ("hermes", f"<tool_call>{CALL}</tool_call>", "\ndone", "\ndone", 0),
        ("hermes", "<tool_call>", "is a tag", "<tool_call>is a tag", 0),
        ("qwen_xml", f"<tool_call>\n{XML[:45]}", f"{XML[45:]}\n</tool_call>", "", 1),
        ("qwen_xml", f"I {XML[:30]}", XML[30:], "", 1),
        ("llama3", LLAMA[:30], LLAMA[30:], "", 1),
        ("llama3", "So: ", LLAMA, LLAMA, 0),
        ("llama3", f"x<|python_tag|>{CALL[:20]}", CALL[20:], "", 1),
    ],
)
def test_calls_are_read_from_the_middle(form: CallFormat, content: str, said: str, text: str, calls: int) -> None:
    """A call that the message has begun is returned whole: its name and arguments can't be shown in part."""
    pieces = read(prompt(TOOLS, content, form, tools=[WEATHER]), said)
    assert pieces.text == text
    assert [(call.name, msgspec.json.decode(call.arguments)) for call in pieces.calls] == [
        ("get_weather", {"city": "Oslo"})
    ] * calls


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"add_generation_prompt": True}, "continue_final_message"),
        ({"last": {"role": "user"}}, "continue_final_message"),
        ({"last": {"tool_calls": [{"id": "c", "function": {"name": "f"}}]}}, "messages[1].tool_calls"),
        ({"tools": [WEATHER], "tool_choice": "required", "last": {"content": "<tool_call>{"}}, "tools"),
    ],
)
def test_a_message_that_can_not_be_continued(fields: dict[str, Any], param: str) -> None:
    """It is refused by name, and nothing of it is dropped without a word."""
    with pytest.raises(RequestError) as caught:
        prompt(TOOLS + "{# tool_calls #}", "Hello", "hermes", **fields)
    assert caught.value.param == param


def test_a_template_that_drops_the_end_of_a_message() -> None:
    with pytest.raises(TemplateFailed) as caught:
        prompt("{% for message in messages %}{{ message.content[:3] }}{% endfor %}", "Hello")
    assert caught.value.param == "messages[1].content"


def test_a_constraint_holds_for_the_continuation_alone() -> None:
    """As in vLLM: the grammar begins where the message ends."""
    prompt_text = prompt(KEEPS, '{"a": ', guided_regex="[0-9]+}")
    assert prompt_text.constraint is not None and prompt_text.constraint.param == "guided_regex"
    assert prompt_text.text.endswith('{"a": ')
