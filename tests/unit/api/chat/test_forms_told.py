"""A form of calls is recognised in the template: by the shape of its calls; a model's own response template goes before
the table."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers.utils.chat_parsing import ResponseParser

from api.chat.forms import Forms, forms_of
from api.chat.piece import Piece
from api.chat.reading.parser import AnswerParser
from api.chat.reading.response_template import FormError, form_of
from api.chat.reading.table import TABLE
from api.chat.tokens import Vocabulary
from api.schemas.view import OWN, Calling, Reading, ThinkingMarks
from tests.byte_model import byte_assets, byte_tokenizer
from tests.unit.api.chat.spoken import SPOKEN

LOOP = "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools | tojson }}"


def vocabulary(*texts: str) -> Vocabulary:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in texts])
    return Vocabulary(byte_assets(tokenizer_json=tokenizer.to_str()))


CALL = "' + call.function.name + '"
"""In a template where a name is written."""
SKETCHES: dict[str, list[str]] = {
    "apertus": ['<|tools_prefix|>[{"' + CALL + '": ', "<|tools_suffix|>", "<|inner_prefix|>"],
    "apriel": ["Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", '<tool_calls>[{"name": ', '"arguments": '],
    "command": ["<|START_ACTION|>", '{"tool_call_id": "', '"tool_name": "', "<|END_ACTION|>", "<|START_RESPONSE|>"],
    "command_r": ["Action:", "```json", '"tool_name": title of the tool', '"parameters": a list of parameters'],
    "deepseek_dsml": ["<｜DSML｜function_calls>", '<｜DSML｜invoke name="', "<think>"],
    "deepseek_v4": ["<｜DSML｜tool_calls>", '<｜DSML｜invoke name="', "<think>"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"],
    "deepseek_v31": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "</think>"],
    "function_json": ["<function=" + CALL + ">", "</function>", "<|python_tag|>"],
    "functionary": [">>>${recipient}", "'>>>all\\n' + ", "'>>>' + ", "<|start_header_id|>"],
    "functools": [" functools[", '"name"', '"arguments"'],
    "gemma4": ["<|tool_call>call:", "<tool_call|>", "<|channel>thought", "<channel|>", '"name"'],
    "gigachat": ["<|role_sep|>", "<|function_call|>", '{"name": "', '"arguments": '],
    "gigachat_role": ["<|role_sep|>", "'role': 'function call'", '{"name": "', '"arguments": '],
    "glm": ["<tool_call>" + CALL, "<arg_key>", "<arg_value>", '"name"', '"arguments"', "<think>"],
    "granite": ["<|start_of_role|>", "<|tool_call|>", "<think>", '"name"', '"arguments"'],
    "harmony": ["<|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>commentary ", "<|call|>"],
    "hermes": ["<tool_call>", '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}', "<think>"],
    "hunyuan": ["<tool_calls>", "<tool_call>" + CALL, "```json", "</tool_calls>"],
    "hunyuan3": [
        "':opensource'",
        "'<tool_call{}>'",
        "'<tool_sep{}>'",
        "'<arg_key{}>'",
        "'<arg_value{}>'",
        "'<think{}>'",
    ],
    "hunyuan_list": ["<tool_calls>", '{"name": "', '"arguments": ', "<|extra_0|>"],
    "kimi": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"],
    "kimi_k3": ["'<|open|>' + tag", "'<|sep|>'", "'<|close|>' + tag", "open_tag('call'"],
    "internlm": ["<|action_start|><|plugin|>", "<|action_end|>"],
    "lfm2_json": ["<|tool_call_start|>[", '{"name": "', '"arguments": ', "]<|tool_call_end|>"],
    "longcat": ["<longcat_tool_call>", '{"name": "', '"arguments": ', "</longcat_tool_call>", "<longcat_think>"],
    "step3": ["<｜tool_calls_begin｜>", '<steptml:invoke name="', '<steptml:parameter name="', "<think>"],
    "lfm2": ["<|tool_call_start|>[", "]<|tool_call_end|>", "<think>"],
    "llama3": ["Environment: ipython", '{"name": function name, "parameters": dictionary of argument name'],
    "minicpm5": ['<function name="' + CALL + '">', '<param name="', "<![CDATA[", "</think>"],
    "minimax": ["<minimax:tool_call>", '<invoke name="', '<parameter name="', "<think>"],
    "mistral_args": ["[TOOL_CALLS]", "[ARGS]", "[THINK]"],
    "mistral_ids": ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
    "mistral_list": ["[TOOL_CALLS][", '{"name": "', '"arguments": ', '"id": "'],
    "muse": ["<atem:function_calls>", '<atem:invoke name="', '<atem:parameter name="', "assistant to=self<|message|>"],
    "nemotron": ["<TOOLCALL>[", "]</TOOLCALL>", "<think>"],
    "olmo3": ["<function_calls>", "</function_calls>"],
    "phi4": ["<|tool_call|>[", "]<|/tool_call|>", '"name"', '"arguments"'],
    "pythonic": ["[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]"],
    "qwen_xml": ["<tool_call>", "<function=" + CALL + ">", "<parameter=", "</parameter>", '"name"', '"arguments"'],
    "seed": ["<seed:tool_call>", "<function=" + CALL + ">", "<parameter=", "<seed:think>"],
    "solar": ["<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|think|>"],
    "tool_calls_list": ["<tool_calls>[", '{"name": "', '"arguments": '],
}
"""What the published templates of a family write about calls and reasoning, as facts."""


@pytest.mark.parametrize("name", SKETCHES)
def test_the_shape_of_calls_tells_the_form(name: str) -> None:
    """The form of the family and no other one; and the marks of its reasoning where the template has them."""
    forms = forms_of(LOOP + "".join(SKETCHES[name]), vocabulary())
    assert forms.calls == name
    pair = TABLE[name].reasoning[0] if TABLE[name].reasoning else None
    if pair is not None and pair.open.strip() in "".join(SKETCHES[name]):
        assert forms.thinking is not None and forms.thinking.open.strip() == pair.open.strip()


def test_every_form_is_told() -> None:
    assert SKETCHES.keys() == TABLE.keys() - {"plain"}


@pytest.mark.parametrize("tag", ["<tool_call>", "<|tool_call|>", "<tool_calls>", "<function=", "[ARGS]", "tool_calls"])
def test_one_tag_alone_tells_nothing(tag: str) -> None:
    """Many families share a tag."""
    assert forms_of(LOOP + tag, vocabulary()) == Forms()


def test_marks_that_only_the_vocabulary_has() -> None:
    """As LFM2's, whose template does not write calls."""
    assert forms_of(LOOP, vocabulary("<|tool_call_start|>")).calls is None
    assert forms_of(LOOP, vocabulary("<|tool_call_start|>", "<|tool_call_end|>")).calls == "lfm2"


HERMES: dict[str, Any] = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*"},
    },
}


def template(**calls: Any) -> dict[str, Any]:
    """Transformers' form with this field of calls."""
    return HERMES | {"fields": HERMES["fields"] | {"tool_calls": {"repeats": True} | calls}}


NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
XML = template(
    open_pattern=r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
    close_pattern=r"(?:</function>\s*)?</tool_call>\s*",
    content="xml-inline",
    content_args={
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>",
        "value_parser": {"name": "json", "args": {"allow_non_json": True}},
    },
    transform=NAMED,
)
GLM = template(
    open_pattern=r"<tool_call>(?P<name>\S+)\n?",
    close_pattern=r"</tool_call>\s*",
    content="xml-inline",
    content_args={
        "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        "value_parser": {"name": "json", "args": {"allow_non_json": True}},
    },
    transform=NAMED,
)
ARGS = template(open_pattern=r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]", content="json", transform=NAMED, close="[/ARGS]")
LISTED = template(
    open="<TOOLCALL>",
    close="</TOOLCALL>",
    content="json",
    transform_each=True,
    transform={"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
)
GEMMA = template(
    open_pattern=r"<\|tool_call>call:(?P<name>\w+)",
    close="<tool_call|>",
    content="json",
    content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    transform=NAMED,
)
ARGUMENTS: dict[str, Any] = {"city": "Zürich", "days": 3, "tags": ["a", {"k": True}], "note": "a, b"}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "hermes": (HERMES, SPOKEN["hermes"].calls(("f", ARGUMENTS), ("g", {}))),
    "xml": (XML, SPOKEN["qwen_xml"].calls(("f", ARGUMENTS), ("f", {"city": "x"}))),
    "glm": (GLM, SPOKEN["glm"].calls(("f", ARGUMENTS), ("f", {"city": "x"}))),
    "args": (ARGS, SPOKEN["mistral_args"].calls(("f", ARGUMENTS)) + "[/ARGS]"),
    "listed": (LISTED, f'<TOOLCALL>[{{"tool_name": "f", "parameters": {json.dumps(ARGUMENTS)}}}]</TOOLCALL>'),
    "gemma": (GEMMA, SPOKEN["gemma4"].calls(("f", ARGUMENTS), ("g", {}))),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("before", ["", "I look.\n", "<think>\nSo it is.\n</think>\n\n", "<think>So.</think>I look.\n"])
def test_a_models_own_template_is_read_as_transformers_does(case: str, before: str) -> None:
    """Reasoning, content and calls are the same as of transformers' parser, character by character too."""
    own, said = CASES[case]
    oracle = ResponseParser(own, prefix="")
    oracle.feed(before + said)
    message, _ = oracle.finalize()
    forms = forms_of(LOOP, vocabulary(), own=own)
    assert (forms.calls, forms.thinking, forms.text) == (OWN, ThinkingMarks(), "own")
    how = Reading(forms.thinking, Calling(OWN, literal={"f": ["days", "tags"]}), own=own)
    for texts in ([before + said], list(before + said)):
        parser, whole = AnswerParser(how, "rid", 0), Piece(0, 0)
        for text in texts:
            piece = Piece(0, 0)
            parser.push(text, piece)
            whole.collect(piece)
        parser.end(piece := Piece(0, 0))
        whole.collect(piece)
        calls = message["tool_calls"]
        expected = [call for one in calls for call in (one if isinstance(one, list) else [one])]
        assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == [
            (call["function"]["name"], call["function"]["arguments"]) for call in expected
        ]
        assert whole.reasoning == message.get("reasoning_content", "")
        # Transformers keeps the last of several contents; the one here is before the calls.
        assert whole.text == before.rpartition("</think>")[2].strip()


def test_the_chat_template_says_which_line_breaks_are_written() -> None:
    """A demanded call has those; without any the marks stand as they are."""
    source = LOOP + '<tool_call>\\n{"name": "\' + name + \'"}\\n</tool_call>'
    for text, open_, close in ((source, "<tool_call>\n", "\n</tool_call>"), (LOOP, "<tool_call>", "</tool_call>")):
        form = forms_of(text, vocabulary(), own=HERMES).form
        assert form is not None and form.calls is not None
        assert (form.calls.open, form.calls.close) == ([open_], [close])


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ([], "'fields'"),
        ({"fields": {}}, "'fields'"),
        ({"version": 2, "fields": {"content": {}}}, "version"),
        ({"fields": {"content": 3}}, "'content'"),
        ({"fields": {"content": {"open": ""}}}, "'open'"),
        ({"fields": {"content": {"open": ["x"] * 9}}}, "'open'"),
        ({"fields": {"content": {"open": "x" * 200}}}, "'open'"),
        ({"fields": {"content": {"open": "x" * 20_000}}}, "bytes"),
        ({"fields": {"reasoning_content": {"open": "<think>"}}}, "closes"),
        (template(open_pattern="(a+)+b", content="json", transform=NAMED), "a pattern"),
        (template(open_pattern="(?P<name>a", content="json", transform=NAMED), "can't be read"),
        (template(open_pattern="(" * 400 + ")" * 400, content="json", transform=NAMED), ""),
        (template(open_pattern="x" * 600, content="json", transform=NAMED), "a pattern"),
        (template(open="<x>", content="kv-lines"), "kv-lines"),
        (template(open="<x>", content="xml-inline", content_args={"tag_pattern": "<a>"}, transform=NAMED), "{key}"),
    ],
)
def test_a_template_that_can_not_be_read(own: Any, reason: str) -> None:
    """It is refused with a reason and without being run, and the table's form takes its place."""
    with pytest.raises(FormError) as caught:
        form_of(OWN, own)
    assert reason in str(caught.value)
    assert forms_of(LOOP + "".join(SKETCHES["glm"]), vocabulary(), own=own).calls == "glm"


def test_a_table_that_knows_more_goes_first() -> None:
    """Transformers' form has no words for harmony's headers; a form that an operator names goes before all."""
    assert forms_of(LOOP + "".join(SKETCHES["harmony"]), vocabulary(), own=HERMES).calls == "harmony"
    assert forms_of(LOOP, vocabulary(), "glm", own=HERMES).calls == "glm"
