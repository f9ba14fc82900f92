"""A Lark grammar of texts as one of the same texts inside a JSON string, where they are written with escapes.

Quoted texts are rewritten, and the characters and classes of regular expressions. All rules become terminals, so that
the grammar is one regular expression: a lexer that takes the longest match would take a backslash for the wrong one.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter

_TOKEN = re.compile(
    r"(?P<comment>(?:\#|//)[^\n]*)"
    r'|(?P<string>"(?:\\.|[^"\\])*"i?)'
    r"|(?P<regex>/(?:\\.|[^/\\])+/[a-z]*)"
    r"|%import[ ]+common\.(?P<imported>\w+)(?:[ ]*->[ ]*(?P<renamed>\w+))?[ ]*(?=\n|$)"
    r"|(?P<alias>->[ ]*\w+)"
    r"|[?!]?(?<!\w)(?P<rule>_?[a-z][_a-z0-9]*)(?!\w)(?P<defined>[ \t]*:)?"
    r"|(?P<other>%\w*|[<@\[\"/]|\.\.)"
)
_TERMINAL = "RULE_"
_MOST_CHARACTERS = 8192
_COMMON = {
    "LF": r"/\n/",
    "CR": r"/\r/",
    "NEWLINE": r"/(\r?\n)+/",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
    "ESCAPED_STRING": r'/"([^"\\\n]|\\[^\n])*"/',
}
"""Of Lark's library, those that match characters with an escape."""
_UNCHANGED = (
    "DIGIT",
    "HEXDIGIT",
    "INT",
    "SIGNED_INT",
    "DECIMAL",
    "FLOAT",
    "SIGNED_FLOAT",
    "NUMBER",
    "SIGNED_NUMBER",
    "LCASE_LETTER",
    "UCASE_LETTER",
    "LETTER",
    "WORD",
    "CNAME",
)
_ESCAPED = '"\\\n\r\t\b\f'
_PLAIN = r'[^"\\\x00-\x1f]'
_NAMED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_CLASS = re.compile(r"\[(\^?)((?:\\[nrtfvdwsDWS]|\\[^\w\s]|[^\[\]\\])+)\]")
_CLASSES = {r"\d": "", r"\w": "", r"\s": "\n\r\t\f", r"\D": _ESCAPED, r"\W": _ESCAPED, r"\S": '"\\\b'}
"""The members of classes that have an escape."""
_MEMBER = re.compile(r"(\\.|[^\\])(?:-(\\.|[^\\]))?", re.DOTALL)
_WITH_ESCAPES = re.compile(r'\\[nrtf"\\]|["\n\r\t\f]')
_NOT_IN_CLASSES = ("&&", "--", "~~")


class _NotKnownHere(Exception):
    """A part of the grammar that can't be rewritten."""


@lru_cache(maxsize=256)
def in_json_string(grammar: str) -> str | None:
    """The grammar of the escaped texts; None for one that is long, recursive, or has parts that can't be rewritten."""
    if len(grammar) > _MOST_CHARACTERS:
        return None
    try:
        if _recursive(grammar):
            return None
        return f"start: {_TERMINAL}START\n{_TOKEN.sub(_token, grammar)}"
    except (_NotKnownHere, ValueError, re.error):
        return None


def _recursive(grammar: str) -> bool:
    """True if a rule refers to itself, over others or not. Raises _NotKnownHere at once for what has no rewriting."""
    uses: dict[str, set[str]] = {}
    current = set[str]()
    for match in _TOKEN.finditer(grammar):
        if match["other"] is not None:
            raise _NotKnownHere
        if match["defined"] is not None:
            current = uses.setdefault(match["rule"], set())
        elif match["rule"] is not None:
            current.add(match["rule"])
    try:
        TopologicalSorter(uses).prepare()
    except CycleError:
        return True
    return False


def _token(match: re.Match[str]) -> str:
    if match["comment"] is not None or match["alias"] is not None:
        return ""
    if match["string"] is not None:
        return _string(match["string"])
    if match["rule"] is not None:
        return _TERMINAL + match["rule"].upper() + (match["defined"] or "")
    if match["regex"] is not None:
        body, _, flags = match["regex"][1:].rpartition("/")
        return f"/{_regex(body, flags)}/"
    if match["imported"] in _COMMON:
        return f"{match['renamed'] or match['imported']}: {_TOKEN.sub(_token, _COMMON[match['imported']])}"
    if match["imported"] in _UNCHANGED:
        return match[0]
    raise _NotKnownHere


def _string(token: str) -> str:
    quoted = token.removesuffix("i")
    text = json.loads(re.sub(r"\\x(..)", r"\\u00\1", quoted))
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    if escaped != text and quoted != token:  # an escape has one case
        raise _NotKnownHere
    return json.dumps(escaped, ensure_ascii=False) + token[len(quoted) :]


def _regex(body: str, flags: str) -> str:
    if flags not in ("", "s"):
        raise _NotKnownHere
    parts: list[str] = []
    at = 0
    while at < len(body):
        part, length = _atom(body, at, "s" in flags)
        parts.append(part)
        at += length
    return "".join(parts)


def _atom(body: str, at: int, dot_is_all: bool) -> tuple[str, int]:
    """The part of a regular expression at `at`, rewritten, and its length."""
    first = body[at]
    second = body[at + 1 : at + 2]
    if first == "\\":
        if second in ("d", "w"):
            return first + second, 2
        if second in ("s", "S", "D", "W"):
            return _class("", first + second), 2
        if second in _NAMED or not second.isalnum():
            return _character(_NAMED.get(second, second)), 2
        raise _NotKnownHere
    if first == "[":
        match = _CLASS.match(body, at)
        if match is None or any(mark in match[2] for mark in _NOT_IN_CLASSES):
            raise _NotKnownHere
        return _class(match[1], match[2]), len(match[0])
    if first == ".":
        return _class("", r"\s\S") if dot_is_all else _class("^", r"\n"), 1
    if first in "^$" or (first == "(" and second == "?" and body[at + 2 : at + 3] != ":"):
        raise _NotKnownHere
    if first == "(" and second == "?":
        return "(?:", 3
    return (first if first in "()*+?{}|," else _character(first)), 1


def _character(character: str) -> str:
    """The regular expression of one character as it is escaped."""
    escaped = json.dumps(character, ensure_ascii=False)[1:-1]
    text = "".join(letter if letter.isalnum() or ord(letter) > 127 else f"\\{letter}" for letter in escaped)
    return text if escaped == character else f"(?:{text})"


def _class(negated: str, inner: str) -> str:
    """A class of characters: those that are written as they are, or the escape of another one."""
    members = set[str]()
    for match in _MEMBER.finditer(inner):
        first = match[1]
        last = match[2]
        if first in _CLASSES and last is None:
            members.update(_CLASSES[first])
            continue
        low = _unescaped(first)
        high = low if last is None else _unescaped(last)
        if first in _CLASSES or high < low:
            raise _NotKnownHere
        members.update(character for character in _ESCAPED if low <= character <= high)
    escapes = [_ESCAPES[character] for character in _ESCAPED if (character in members) != bool(negated)]
    only_escapes = not negated and not _WITH_ESCAPES.sub("", inner)
    plain = [] if only_escapes else [f"[[{negated}{inner}]&&{_PLAIN}]"]
    return f"(?:{'|'.join([*plain, *escapes])})"


def _unescaped(text: str) -> str:
    """The character that a class names, as itself or with a backslash."""
    return _NAMED.get(text[1:], text[1:]) if text.startswith("\\") else text


_ESCAPES = {character: _character(character) for character in _ESCAPED}
