"""Rules for arguments with bare keys and quotes of their own, or in Python's words, from a function's schema.

They bound types, enumerations, required names and nesting; other keywords of a schema are passed over.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

_DEPTH = 12
_QUOTE = json.dumps('"')
_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Schema = dict[str, Any]


class RelaxedGrammar:
    """The rules of one function's arguments; their names begin with `prefix`."""

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
        started: str | None = None
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
                return "(" + " | ".join(self._value(one, depth + 1) for one in schema[name]) + ")"
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
