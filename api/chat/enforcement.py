"""The grammar that enforces calls in the model's own form, and that allows reasoning before a demanded answer.

It is made from the data by which answers are read. The text is Lark with `%json`, as llguidance reads it; a token that
was added to the vocabulary stands as `<[id]>`, because quoted text never matches one.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from api.chat.reading.arguments import may_be_text
from api.chat.reading.form import CallForm, CallShape, Form
from api.chat.reading.table import TABLE
from api.chat.tokens import Vocabulary
from api.schemas.chat import LARK, Function, Offer
from api.schemas.escaped_lark import in_json_string
from api.schemas.view import CallFormat, ThinkingMarks

_TEXT = "TEXT: /(.|\\n)+/"
_ONE_SPACE = {"whitespace_pattern": "[ ]?"}
_LENIENT = {**_ONE_SPACE, "lenient": True, "coerce_one_of": True}
"""For tools that are not strict: keywords that can't be enforced are passed over."""
_HOLE = re.compile(r"(\{id\}|\{index\}|\{arguments\}|\{parameters\})")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


def answer_grammar(
    offer: Offer | None,
    form: Form | CallFormat | None,
    thinking: ThinkingMarks | None,
    vocabulary: Vocabulary,
    answer: str | None = None,
    prompted: str = "",
) -> str | None:
    """The grammar of the answer; None where the model is free.

    `thinking` are the marks of a reasoning that the answer may begin with, `answer` is what it has to be where it is
    no call, as Lark; `prompted` is the beginning of its first mark, which stands in the prompt. Where neither a call
    nor that is demanded, strict functions still are what they say, if the model's opening tag is a token of its own.
    """
    form = TABLE.get(form) if isinstance(form, str) else form
    calls = form.calls if form is not None and offer is not None else None
    if calls is None and answer is None:
        return None
    writer = _Writer(form or Form(""), vocabulary, prompted)
    rules = writer.calls(calls, offer) if calls is not None and offer is not None else []
    if calls is None or offer is None:
        body = "answer"
    elif offer.must:
        body = "calls"
    elif answer is not None:
        body = "(answer | calls)"
    elif any(function.strict for function in offer.functions) and writer.opens_with_token(calls):
        body = "TEXT? (call TEXT?)?" if offer.single else "TEXT? (call TEXT?)*"
    else:
        return None
    if answer is not None:
        rules += writer.answer(answer)
    prefix = writer.reasoning(thinking) if thinking is not None else []
    return "\n".join([f"start: {'reasoning ' if prefix else ''}{body}", *rules, *prefix, _TEXT])


class _Writer:
    """Writes the rules of one form."""

    def __init__(self, form: Form, vocabulary: Vocabulary, prompted: str) -> None:
        self._form = form
        self._vocabulary = vocabulary
        self._prompted = prompted

    def calls(self, calls: CallForm, offer: Offer) -> list[str]:
        """The rules for one call of an offered function, and for as many as are wanted."""
        shape = calls.shape
        names = " | ".join(f"call{index}" for index in range(len(offer.functions)))
        rules = [
            rule
            for index, function in enumerate(offer.functions)
            for rule in self._function(f"call{index}", function, shape)
        ]
        opened = "" if shape.bare else self.spelled(calls.open[0] if calls.open else "")
        closed = "" if shape.bare else self.spelled(calls.close[0] if calls.close else "")
        if shape.listed:
            opened, closed = f'{opened} "["', f'"]" {closed}'
        if shape.between and (shape.listed or not shape.bare):
            more = "" if offer.single else f" ({self.spelled(shape.between)} one)*"
            return [f"calls: {opened} one{more} {closed}", f"call: {opened} one {closed}", f"one: {names}", *rules]
        single = offer.single or self._form.channels is not None
        more = "" if single else f" ({self.spelled(shape.between or shape.apart)} call)*"
        if self._prompted:
            firsts = [f"first{index}" for index in range(len(offer.functions))]
            for first, function in zip(firsts, offer.functions, strict=True):
                rules += self._function(first, function, shape, self._prompted)
            return [f"calls: ({' | '.join(firsts)}){more}", f"call: {names}", *rules]
        return [f"calls: call{more}", f"call: {opened} one {closed}", f"one: {names}", *rules]

    def opens_with_token(self, calls: CallForm) -> bool:
        """True if a call can't be begun by text."""
        plain = not calls.shape.bare and not self._form.content and self._form.channels is None
        return plain and bool(calls.open) and self._vocabulary.knows(calls.open[0].strip())

    def answer(self, answer: str) -> list[str]:
        """The rules for an answer in a demanded format, in the marks of the form."""
        opened, closed = self._form.answer
        before = self.spelled(opened.removeprefix(self._prompted))
        after = self.spelled(closed)
        return [f"answer: {before} format {after}".rstrip(), f"format: {answer}"]

    def reasoning(self, thinking: ThinkingMarks) -> list[str]:
        """The rules for a reasoning in front; where the prompt has not opened it, it may be left out."""
        close = self.spelled(thinking.close)
        following = self.spelled(self._form.channels.following) if self._form.channels is not None else "BLANK?"
        if close.startswith("<["):
            rules = [f"reasoned: TEXT? {close} {following}"]
        else:
            rules = [f"reasoned: thought {following}\nthought[suffix={close}]: /(.|\\n)*/"]
        opened = "reasoned" if thinking.begun else f"({self.spelled(thinking.open)} reasoned)?"
        return [f"reasoning: {opened}", *rules, "BLANK: /[ \\n]{1,4}/"]

    def spelled(self, text: str) -> str:
        """A text as the model writes it: what is a token of its own stands as that."""
        pieces: list[str] = []
        at = 0
        for start, end, token in self._vocabulary.added_in(text):
            pieces += [_quoted(text[at:start])] if start > at else []
            pieces.append(f"<[{token}]>")
            at = end
        pieces += [_quoted(text[at:])] if at < len(text) else []
        return " ".join(pieces)

    def _function(self, rule: str, function: Function, shape: CallShape, prompted: str = "") -> list[str]:
        """The rules for a call of one function, without its beginning where that stands in the prompt."""
        call = shape.call.replace(shape.optional, "") if shape.optional else shape.call
        rules: list[str] = []
        parts: list[str] = []
        for piece in _HOLE.split(call.removeprefix(prompted).replace("{name}", function.name)):
            match piece:
                case "{id}":
                    parts.append("/[a-zA-Z0-9]{9}/")
                case "{index}":
                    parts.append("/[0-9]{1,2}/")
                case "{arguments}" | "{parameters}":
                    part, more = self._arguments(rule, function, shape)
                    parts += [part] if part else []
                    rules += more
                case text:
                    parts += [self.spelled(text)] if text else []
        return [f"{rule}: {' '.join(parts)}", *rules]

    def _arguments(self, rule: str, function: Function, shape: CallShape) -> tuple[str, list[str]]:
        """The grammar of the arguments, and the rules that it names."""
        if shape.kind == "parameters":
            return self._parameters(rule, function, shape)
        if shape.kind in ("relaxed", "python"):
            grammar = RelaxedGrammar(rule, self.spelled(shape.quote) or _quoted('"'), python=shape.kind == "python")
            return grammar.arguments(function.parameters or _NO_ARGUMENTS), grammar.rules
        return _text_in_json(function) or _schema(function, function.parameters or _NO_ARGUMENTS), []

    def _parameters(self, rule: str, function: Function, shape: CallShape) -> tuple[str, list[str]]:
        """One element per parameter; those that are required must be there."""
        schema = function.parameters or {}
        properties: dict[str, Any] = schema.get("properties") or {}
        required: list[str] = schema.get("required") or []
        rules: list[str] = []
        elements: list[str] = []
        before, _, after = shape.parameter.partition("{value}")
        end = after.rstrip("\n")
        rest = self.spelled(after[len(end) :])
        for place, (key, value) in enumerate(properties.items()):
            name = f"{rule}_{place}"
            text = may_be_text(value)
            kind = "string" if text else _kind(value)
            holes = {"{key}": key, "{text}": "true" if text else "false", "{type}": kind}
            head = self.spelled(re.sub(r"\{(?:key|text|type)\}", lambda hole: holes[hole[0]], before))  # noqa: B023
            closed = self.spelled(end)
            if isinstance(value, dict) and isinstance(cast(dict[str, Any], value).get(LARK), str):
                rules.append(f"{name}: {head} %lark {{\n{value[LARK]}\n}} {closed}")
            elif text and "<[" in closed:
                # A text takes all that is no token, the line break before the mark too.
                values = f"{_text_of(value)} {closed}" if _text_of(value) else f"TEXT? {closed[closed.index('<[') :]}"
                rules.append(f"{name}: {head} {values}")
            elif text:
                rules += [f"{name}: {head} {name}_text", f"{name}_text[suffix={closed}]: {_any_text(value)}"]
            else:
                definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
                rules += [f"{name}: {head} {_schema(function, {**value, **definitions})} {closed}"]
            elements.append(f"({name} {rest})".replace(" )", ")") + ("" if key in required else "?"))
        return " ".join(elements), rules


def _kind(schema: Any) -> str:
    """The type of a value that is no text."""
    kind: Any = schema.get("type") if isinstance(schema, dict) else None
    return {"integer": "number"}.get(kind, kind) if isinstance(kind, str) else "object"


def _text_of(schema: Any) -> str:
    """A text value: one of an enumeration's, or any."""
    values: Any = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return "(" + " | ".join(_quoted(value) for value in values) + ")"
    return ""


def _any_text(schema: Any) -> str:
    return _text_of(schema) or "/(.|\\n)*/"


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


_DEPTH = 12
_QUOTE = json.dumps('"')
_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Schema = dict[str, Any]


class RelaxedGrammar:
    """The rules of one function's arguments, from its schema, where these are not JSON.

    The arguments have bare keys and other quotes, or are in Python's words. The names of the rules begin with `prefix`.

    The rules bound types, enumerations, required names and nesting; other keywords of a schema are passed over.
    """

    def __init__(self, prefix: str, quote: str, *, python: bool) -> None:
        """`quote` is the mark around a text, as Lark."""
        self._prefix = prefix
        self._quote = quote
        self._python = python
        self._root: Schema = {}
        self._count = 0
        self.rules: list[str] = []

    def arguments(self, schema: Schema) -> str:
        """The grammar of the arguments, without a Python call's brackets."""
        self._root = schema
        if self._python:
            return self._members(schema, "=", bare=True, depth=0)
        return f'"{{" {self._members(schema, ":", bare=True, depth=0)} "}}"'

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}_r{self._count}"
        self._count += 1
        self.rules.append(f"{name}: {body}")
        return name

    def _members(self, schema: Schema, pair: str, *, bare: bool, depth: int) -> str:
        """The properties in their order; a comma stands between those that are there."""
        properties = cast(dict[str, Any], schema.get("properties") or {})
        required = set(cast(list[str], schema.get("required") or []))
        comma = '", "' if self._python else '","'
        following = '""'
        # From the last to the first: `following` are the members behind one that is there, `started` those where none
        # is there yet.
        started = '""'
        for key, value in reversed(properties.items()):
            name = key if bare and (not self._python or _BARE.fullmatch(key)) else json.dumps(key)
            separator = pair if bare else ": " if self._python else ":"
            member = self._rule(f"{json.dumps(name + separator)} {self._value(value, depth + 1)}")
            first = f"{member} {following}"
            more = f"{comma} {member} {following}"
            if key not in required:
                first, more = f"{first} | {started}", f"{more} | {following}"
            started = self._rule(first)
            following = self._rule(more)
        return started

    def _value(self, schema: Any, depth: int) -> str:
        schema = self._resolved(schema)
        if depth > _DEPTH:
            return self._text()
        if isinstance(schema.get("enum"), list) or "const" in schema:
            values = cast(list[Any], schema.get("enum") or [schema.get("const")])
            return "(" + " | ".join(self._constant(value) for value in values) + ")"
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                return "(" + " | ".join(self._value(choice, depth + 1) for choice in schema[name]) + ")"
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return "(" + " | ".join(self._value(schema | {"type": kind}, depth + 1) for kind in kinds) + ")"
        match kinds:
            case "integer":
                return r"/-?(0|[1-9][0-9]{0,17})/"
            case "number":
                return r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/"
            case "boolean":
                return '("True" | "False")' if self._python else '("true" | "false")'
            case "null":
                return '"None"' if self._python else '"null"'
            case "array":
                item = self._rule(self._value(schema.get("items", {}), depth + 1))
                comma = '", "' if self._python else '","'
                return f'"[" ({item} ({comma} {item})*)? "]"'
            case "object":
                members = self._members(schema, ":", bare=not self._python, depth=depth)
                return f'"{{" {members} "}}"'
            case _:
                return self._text()

    def _text(self) -> str:
        if self._quote.startswith("<["):
            return f"{self._quote} TEXT? {self._quote}"
        if self._quote != _QUOTE:
            name = f"{self._prefix}_r{self._count}"
            self._count += 1
            self.rules.append(f"{name}[suffix={self._quote}]: /(.|\\n)*/")
            return f"{self._quote} {name}"
        return r'/"([^"\\\n]|\\["\\nt])*"/'

    def _constant(self, value: Any) -> str:
        if isinstance(value, str) and self._quote != _QUOTE:
            return f"{self._quote} {json.dumps(value, ensure_ascii=False)} {self._quote}"
        text = json.dumps(value, ensure_ascii=False)
        if self._python and not isinstance(value, str):
            text = {"true": "True", "false": "False", "null": "None"}.get(text, text)
        return json.dumps(text, ensure_ascii=False)

    def _resolved(self, schema: Any) -> Schema:
        """The schema behind a reference inside the function's own."""
        for _ in range(_DEPTH):
            reference: Any = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str) or not reference.startswith("#/"):
                break
            node: Any = self._root
            for part in reference[2:].split("/"):
                node = node.get(part) if isinstance(node, dict) else None
            schema = node
        return cast(Schema, schema) if isinstance(schema, dict) else {}
