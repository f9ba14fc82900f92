"""A grammar for calls in the model's own form, and for reasoning before what is demanded: what makes it certain.

The text is Lark with `%json`, as llguidance reads it; a token that was added to the vocabulary stands as `<[id]>`,
because quoted text never matches one.
"""

from __future__ import annotations

import json
from typing import Any

from api.chat.reading import hermes, qwen_xml
from api.chat.tokens import Vocabulary
from api.schemas.chat import LARK, Function, Offer
from api.schemas.escaped_lark import in_json_string
from api.schemas.view import CallFormat, Thinking

_TEXT = "TEXT: /(.|\\n)+/"
_ONE_SPACE = {"whitespace_pattern": "[ ]?"}
_LENIENT = {**_ONE_SPACE, "lenient": True, "coerce_one_of": True}
"""For tools that are not strict: keywords that can't be enforced are passed over."""


def answer_grammar(
    offer: Offer | None,
    form: CallFormat | None,
    thinking: Thinking | None,
    vocabulary: Vocabulary,
    answer: str | None = None,
) -> str | None:
    """The grammar of the answer; None where the model is free.

    `thinking` are the marks of a reasoning that the answer may begin with, `answer` is what it has to be where it is
    no call, as Lark. Where neither a call nor that is demanded, strict functions still are what they say, if the
    model's opening tag is a token of its own.
    """
    calling = offer is not None and form is not None
    if not calling and answer is None:
        return None
    writer = _Writer(form or "hermes", vocabulary)
    prefix = writer.reasoning(thinking) if thinking is not None else []
    rules = writer.calls(offer) if offer is not None and form is not None else []
    if offer is None or form is None:
        body = "answer"
    elif offer.must:
        body = "calls"
    elif answer is not None:
        body = "(answer | calls)"
    elif form != "llama3" and vocabulary.knows(hermes.OPEN) and any(function.strict for function in offer.functions):
        body = "TEXT? (call TEXT?)?" if offer.single else "TEXT? (call TEXT?)*"
    else:
        return None
    if answer is not None:
        rules.append(f"answer: {answer}")
    return "\n".join([f"start: {'reasoning ' if prefix else ''}{body}", *rules, *prefix, _TEXT])


class _Writer:
    """Writes the rules of one format."""

    def __init__(self, form: CallFormat, vocabulary: Vocabulary) -> None:
        self._form = form
        self._vocabulary = vocabulary
        self.separator = "; " if form == "llama3" else "\n"

    def calls(self, offer: Offer) -> list[str]:
        """The rules for one call of an offered function, and for as many as are wanted."""
        more = "" if offer.single else f" ({json.dumps(self.separator)} call)*"
        names = " | ".join(f"call{index}" for index in range(len(offer.functions)))
        rules = [rule for index, function in enumerate(offer.functions) for rule in self.function(index, function)]
        return [f"calls: call{more}", f"call: {names}", *rules]

    def function(self, index: int, function: Function) -> list[str]:
        name = json.dumps(function.name)
        if self._form == "qwen_xml":
            return self._tagged(index, function)
        schema = _text_in_json(function) or _schema(
            function, function.parameters or {"type": "object", "properties": {}}
        )
        if self._form == "llama3":
            head = _quoted(f'{{"name": {name}, "parameters": ')
            return [f'call{index}: {head} {schema} "}}"']
        head = _quoted(f'\n{{"name": {name}, "arguments": ')
        tail = _quoted("}\n")
        return [f"call{index}: {self._tag(hermes.OPEN)} {head} {schema} {tail} {self._tag(hermes.CLOSE)}"]

    def reasoning(self, thinking: Thinking) -> list[str]:
        """The rules for a reasoning in front; where the prompt has not opened it, it may be left out."""
        close = self._tag(thinking.close)
        if close.startswith("<["):
            rules = [f"reasoned: TEXT? {close} BLANK?"]
        else:
            rules = [f"reasoned: thought BLANK?\nthought[suffix={close}]: /(.|\\n)*/"]
        opened = "reasoned" if thinking.begun else f"({self._tag(thinking.open)} reasoned)?"
        return [f"reasoning: {opened}", *rules, "BLANK: /[ \\n]{1,4}/"]

    def _tagged(self, index: int, function: Function) -> list[str]:
        """Qwen's XML has one element per parameter; those that are required must be there."""
        schema = function.parameters or {}
        properties: dict[str, Any] = schema.get("properties") or {}
        required: list[str] = schema.get("required") or []
        rules: list[str] = []
        elements: list[str] = []
        for place, (key, value) in enumerate(properties.items()):
            name = f"call{index}_{place}"
            head = _quoted(f"{qwen_xml.PARAMETER}{key}>\n")
            if isinstance(value, dict) and isinstance(value.get(LARK), str):
                rules.append(f"{name}: {head} %lark {{\n{value[LARK]}\n}} {_END}")
            elif qwen_xml.may_be_text(value):
                rules += [f"{name}: {head} {name}_text", f"{name}_text[suffix={_END}]: {_text_of(value)}"]
            else:
                definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
                rules += [f"{name}: {head} {_schema(function, {**value, **definitions})} {_END}"]
            elements.append(f'({name} "\\n")' + ("" if key in required else "?"))
        head = _quoted(f"\n{qwen_xml.FUNCTION}{function.name}>\n")
        tail = _quoted(f"{qwen_xml.END_FUNCTION}\n")
        body = " ".join(elements)
        open_tag = self._tag(qwen_xml.OPEN)
        close_tag = self._tag(qwen_xml.CLOSE)
        return [f"call{index}: {open_tag} {head} {body} {tail} {close_tag}", *rules]

    def _tag(self, text: str) -> str:
        token = self._vocabulary.tokenizer.token_to_id(text) if self._vocabulary.knows(text) else None
        return _quoted(text) if token is None else f"<[{token}]>"


_END = json.dumps("\n" + qwen_xml.END_PARAMETER)


def _text_of(schema: Any) -> str:
    """A text value: one of an enumeration's, or any."""
    values: Any = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return "(" + " | ".join(_quoted(value) for value in values) + ")"
    return "/(.|\\n)*/"


def _schema(function: Function, schema: Any) -> str:
    """A value of the schema, as `%json`."""
    if isinstance(schema, dict):
        # A model that is free to make up arguments does; a schema that wants others than it names says so.
        closed = {"additionalProperties": False} if "properties" in schema and not function.strict else {}
        schema = {**closed, **schema, "x-guidance": _ONE_SPACE if function.strict else _LENIENT}
    return "%json " + json.dumps(schema, ensure_ascii=False)


def _text_in_json(function: Function) -> str | None:
    """The arguments of a function whose only parameter has a Lark grammar; None for others."""
    properties: Any = (function.parameters or {}).get("properties")
    if not isinstance(properties, dict) or len(properties) != 1:  # type: ignore[misc]
        return None
    [(name, value)] = properties.items()  # type: ignore[misc]
    grammar: Any = value.get(LARK) if isinstance(value, dict) else None
    inner = in_json_string(grammar) if isinstance(grammar, str) and "pattern" not in value else None
    if inner is None:
        return None
    head = _quoted(f'{{{json.dumps(name)}: "')
    tail = _quoted('"}')
    return f"{head} %lark {{\n{inner}\n}} {tail}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
