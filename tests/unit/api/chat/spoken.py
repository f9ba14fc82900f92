"""Answers as the models of each family write them: the marks of their published templates, as facts.

A call is written here by hand, not by the table of forms, so that a mistake in the table is seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Arguments = Mapping[str, Any]

DSML = "｜DSML｜"


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def value_of(value: Any) -> str:
    """A value in a form without types: a text as it is, others as JSON."""
    return value if isinstance(value, str) else as_json(value)


def python(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{python(key)}: {python(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(python, value)) + "]"
    return repr(value)


def gemma(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else as_json(value)


def named(name: str, arguments: Arguments, keys: tuple[str, str] = ("name", "arguments")) -> str:
    return f'{{"{keys[0]}": "{name}", "{keys[1]}": {as_json(arguments)}}}'


def listed(opened: str, closed: str, keys: tuple[str, str] = ("name", "arguments")) -> Callable[..., str]:
    return lambda *calls: opened + "[" + ", ".join(named(name, one, keys) for name, one in calls) + "]" + closed


def each(write: Callable[[str, Arguments], str], between: str = "") -> Callable[..., str]:
    return lambda *calls: between.join(write(*call) for call in calls)


def around(opened: str, closed: str, write: Callable[[str, Arguments], str], between: str = "") -> Callable[..., str]:
    return lambda *calls: opened + between.join(write(*call) for call in calls) + closed


def tagged(head: str, parameter: str, tail: str) -> Callable[[str, Arguments], str]:
    """%n, %k and %v stand for the name, a key and a value."""

    def write(name: str, arguments: Arguments) -> str:
        texts = [parameter.replace("%k", key).replace("%v", value_of(value)) for key, value in arguments.items()]
        return head.replace("%n", name) + "".join(texts) + tail

    return write


def dsml(name: str, arguments: Arguments) -> str:
    texts = [
        f'<{DSML}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">{value_of(value)}'
        f"</{DSML}parameter>\n"
        for key, value in arguments.items()
    ]
    return f'<{DSML}invoke name="{name}">\n{"".join(texts)}</{DSML}invoke>\n'


def minicpm(name: str, arguments: Arguments) -> str:
    """Texts with signs of XML or line breaks stand in CDATA."""
    texts: list[str] = []
    for key, value in arguments.items():
        text = value_of(value)
        wrapped = isinstance(value, str) and any(sign in value for sign in "<&\n")
        texts.append(f'<param name="{key}">{f"<![CDATA[{text}]]>" if wrapped else text}</param>')
    return f'<function name="{name}">{"".join(texts)}</function>'


def kimi_k3(name: str, arguments: Arguments) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", list: "array", dict: "object", type(None): "null"}
    texts = [
        f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>{value_of(value)}<|close|>argument<|sep|>'
        for key, value in arguments.items()
    ]
    return f'<|open|>call tool="{name}" index="1"<|sep|>{"".join(texts)}<|close|>call<|sep|>'


def pythonic(name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={python(value)}' for key, value in arguments.items())})"


@dataclass(frozen=True)
class Spoken:
    """How a family writes: calls, the marks of its reasoning and around its text, and what it can't say."""

    calls: Callable[..., str]
    think: tuple[str, str] | None = None
    text: tuple[str, str] = ("", "")
    parallel: bool = True
    nested: bool = True
    """False if a call inside of reasoning is none: the form has no mark for its beginning."""
    beside: bool = True
    """False if calls stand alone: text before one makes it text."""


THINK = ("<think>\n", "\n</think>\n\n")
MISTRAL = ("[THINK]", "[/THINK]")
V3 = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

SPOKEN: dict[str, Spoken] = {
    "apertus": Spoken(
        around(
            "<|tools_prefix|>[",
            "]<|tools_suffix|>",
            lambda name, arguments: f'{{"{name}": {as_json(arguments)}}}',
            ", ",
        ),
        ("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "apriel": Spoken(
        listed("<tool_calls>", "</tool_calls>"), ("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n")
    ),
    "command": Spoken(
        lambda *calls: (
            "<|START_ACTION|>[\n"
            + ",\n".join(
                f'    {{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {as_json(arguments)}}}'
                for index, (name, arguments) in enumerate(calls)
            )
            + "\n]<|END_ACTION|>"
        ),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "command_r": Spoken(listed("Action:\n```json\n", "\n```", ("tool_name", "parameters"))),
    "deepseek_dsml": Spoken(around(f"<{DSML}function_calls>\n", f"</{DSML}function_calls>", dsml), THINK),
    "deepseek_v4": Spoken(around(f"<{DSML}tool_calls>\n", f"</{DSML}tool_calls>", dsml), THINK),
    "deepseek_v3": Spoken(
        around(
            *V3,
            lambda name, arguments: (
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
                + f"{name}\n```json\n{as_json(arguments)}\n```<｜tool▁call▁end｜>"
            ),
            "\n",
        ),
        THINK,
    ),
    "deepseek_v31": Spoken(
        around(
            *V3,
            lambda name, arguments: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(arguments)}<｜tool▁call▁end｜>",
        ),
        THINK,
    ),
    "function_json": Spoken(each(lambda name, arguments: f"<function={name}>{as_json(arguments)}</function>")),
    "functionary": Spoken(each(lambda name, arguments: f">>>{name}\n{as_json(arguments)}"), text=(">>>all\n", "")),
    "functools": Spoken(listed(" functools", "")),
    "gemma4": Spoken(
        each(lambda name, arguments: f"<|tool_call>call:{name}{gemma(arguments)}<tool_call|>"),
        ("<|channel>thought\n", "\n<channel|>"),
    ),
    "gigachat": Spoken(each(lambda name, arguments: "<|function_call|>" + named(name, arguments))),
    "gigachat_role": Spoken(
        each(lambda name, one: f"<|message_sep|>\n\nfunction call<|role_sep|>\n{named(name, one)}")
    ),
    "glm": Spoken(
        each(
            tagged("<tool_call>%n\n", "<arg_key>%k</arg_key>\n<arg_value>%v</arg_value>\n", "</tool_call>"),
            "\n",
        ),
        THINK,
    ),
    "granite": Spoken(listed("<|tool_call|>", ""), THINK),
    "harmony": Spoken(
        each(
            lambda name, arguments: (
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
                + f"{as_json(arguments)}<|call|>"
            ),
            "<|start|>assistant",
        ),
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        ("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
        nested=False,
    ),
    "hermes": Spoken(each(lambda name, arguments: f"<tool_call>\n{named(name, arguments)}\n</tool_call>", "\n"), THINK),
    "hunyuan": Spoken(
        around(
            "<tool_calls>\n",
            "</tool_calls>",
            lambda name, arguments: f"<tool_call>{name}\n```json\n{as_json(arguments)}\n```\n</tool_call>\n",
        ),
        THINK,
        ("<answer>\n", "\n</answer>"),
    ),
    "hunyuan3": Spoken(
        around(
            "<tool_calls:opensource>\n",
            "</tool_calls:opensource>",
            tagged(
                "<tool_call:opensource>%n<tool_sep:opensource>\n",
                "<arg_key:opensource>%k</arg_key:opensource>\n<arg_value:opensource>%v</arg_value:opensource>\n",
                "</tool_call:opensource>\n",
            ),
        ),
        ("<think:opensource>", "</think:opensource>"),
    ),
    "hunyuan_list": Spoken(listed("<tool_calls>", "</tool_calls>"), THINK, ("<answer>\n", "\n</answer>")),
    "kimi": Spoken(
        lambda *calls: (
            "<|tool_calls_section_begin|>"
            + "".join(
                f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{as_json(arguments)}"
                "<|tool_call_end|>"
                for index, (name, arguments) in enumerate(calls)
            )
            + "<|tool_calls_section_end|>"
        ),
        THINK,
    ),
    "kimi_k3": Spoken(
        around("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", kimi_k3),
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    "internlm": Spoken(
        each(
            lambda name, arguments: (
                "<|action_start|><|plugin|>\n" + f"{named(name, arguments, ('name', 'parameters'))}<|action_end|>"
            ),
            "\n",
        )
    ),
    "lfm2_json": Spoken(listed("<|tool_call_start|>", "<|tool_call_end|>"), THINK),
    "longcat": Spoken(
        each(lambda name, arguments: f"<longcat_tool_call>\n{named(name, arguments)}\n</longcat_tool_call>", "\n"),
        ("<longcat_think>\n", "\n</longcat_think>\n"),
    ),
    "lfm2": Spoken(around("<|tool_call_start|>[", "]<|tool_call_end|>", pythonic, ", "), THINK),
    "llama3": Spoken(
        each(lambda name, arguments: named(name, arguments, ("name", "parameters")), "; "), nested=False, beside=False
    ),
    "minicpm5": Spoken(each(minicpm, "\n"), THINK),
    "minimax": Spoken(
        around(
            "<minimax:tool_call>\n",
            "</minimax:tool_call>",
            tagged('<invoke name="%n">\n', '<parameter name="%k">%v</parameter>\n', "</invoke>\n"),
        ),
        THINK,
    ),
    "mistral_args": Spoken(each(lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{as_json(arguments)}"), MISTRAL),
    "mistral_ids": Spoken(
        each(lambda name, arguments: f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4e[ARGS]{as_json(arguments)}"), MISTRAL
    ),
    "mistral_list": Spoken(
        lambda *calls: (
            "[TOOL_CALLS]["
            + ", ".join(
                f'{{"name": "{name}", "arguments": {as_json(arguments)}, "id": "a1B2c3D4e"}}'
                for name, arguments in calls
            )
            + "]"
        ),
        MISTRAL,
    ),
    "muse": Spoken(
        each(
            tagged(
                ' to=%n<|message|><atem:function_calls>\n<atem:invoke name="%n">\n',
                '<atem:parameter name="%k">%v</atem:parameter>\n',
                "</atem:invoke>\n</atem:function_calls>",
            ),
            "<|eom|><|start|>assistant",
        ),
        (" to=self<|message|>", "<|eom|><|start|>assistant"),
        (" to=user<|message|>", "<|eom|><|start|>assistant"),
    ),
    "nemotron": Spoken(listed("<TOOLCALL>", "</TOOLCALL>"), THINK),
    "olmo3": Spoken(around("<function_calls>", "</function_calls>", pythonic, "\n"), THINK),
    "phi4": Spoken(listed("<|tool_call|>", "<|/tool_call|>")),
    "plain": Spoken(each(named, "\n"), nested=False, beside=False),
    "pythonic": Spoken(around("[", "]", pythonic, ", "), nested=False, beside=False),
    "qwen_xml": Spoken(
        each(
            tagged("<tool_call>\n<function=%n>\n", "<parameter=%k>\n%v\n</parameter>\n", "</function>\n</tool_call>"),
            "\n",
        ),
        THINK,
    ),
    "seed": Spoken(
        each(
            tagged(
                "<seed:tool_call>\n<function=%n>\n", "<parameter=%k>%v</parameter>\n", "</function>\n</seed:tool_call>"
            ),
            "\n",
        ),
        ("<seed:think>", "</seed:think>"),
    ),
    "solar": Spoken(
        around(
            "<|tool_calls|>",
            "<|calls|>",
            lambda name, arguments: (
                "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>"
                + f"{name}<|tool_call:args|>{as_json(arguments)}<|tool_call:end|>"
            ),
        ),
        ("<|think|>", "<|end|><|begin|>assistant"),
        ("<|content|>", "<|end|><|begin|>assistant"),
    ),
    "step3": Spoken(
        around(
            "<｜tool_calls_begin｜>\n",
            "<｜tool_calls_end｜>",
            tagged(
                '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="%n">',
                '<steptml:parameter name="%k">%v</steptml:parameter>',
                "</steptml:invoke><｜tool_call_end｜>\n",
            ),
        ),
        THINK,
    ),
    "tool_calls_list": Spoken(listed("<tool_calls>", "</tool_calls>"), THINK),
}
