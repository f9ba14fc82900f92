"""Lua scripts as such: their files, rules, checks of arguments and bounds of work, and the code that loads them.

Each file's header lists its KEYS and ARGV with types. The loader changes the text in three ways. A line
`--@include name` is replaced by the file `_name.lua`. The lines `--@keys`, `--@arguments` and `--@model` are replaced
by the checks that a script makes before its first write (`checks`). The constants of control/constants.py that the
script mentions, and the names of classes and group, are declared at its beginning, so that each is written down once.
A script that continues admitted work begins with `_goes_on.lua`, so that a server beyond its maxmemory refuses new
work alone.

Rules that hold for all of them: only commands of Redis 6.2; never KEYS or SCAN; the server's TIME is the only clock;
numbers leave Lua through `whole`, because Lua's own formatting turns a millisecond stamp into 1.7e+12; a script may be
sent twice (the first reply can be lost) and then answers the same.

Redis does not take back what a script wrote before it failed. So each script says what its KEYS and ARGV are, and the
loader puts the checks in front of it:

    --@keys string string hash            the type of each key; a key that is absent passes, `any` is not looked at
    --@arguments token base count text…   the kind of each argument; `…` is the kind of all that follow, `one=other…`
                                          the kinds of pairs
    --@model load bell classes            keys of the model that the script writes besides, whose types are known

A refusal is an error with the word REFUSED. control.redis.connection raises it as ArgumentsRefused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from control import constants, keys

_REFUSAL = re.compile(r"REFUSED (.*?); nothing was written", re.DOTALL)
_KEYS = re.compile(r"^--@keys (.+)\n", re.MULTILINE)
_ARGUMENTS = re.compile(r"^--@arguments(?: (.*))?\n", re.MULTILINE)
_MODEL = re.compile(r"^--@model (.+)\n", re.MULTILINE)
_MODEL_TYPES = {"load": "hash", "bell": "stream", "orphans": "zset", "settlements": "stream", "classes": "zset"}
_OF_A_CLASS = ("turns", "served", "debts", "waiting")
_MOST = 7_000
"""Lua hands a function about 8,000 values at once: `unpack` of more fails in the middle of a script."""

_COUNT = "a whole number of at most 15 digits"
_KINDS: dict[str, tuple[str, str]] = {
    "name": ("{0} ~= ''", "a text with anything in it"),
    "word": ("string.find({0}, '^%S+$')", "a word without white space"),
    "count": ("is_count({0})", _COUNT),
    "count?": ("({0} == '' or is_count({0}))", f"{_COUNT}, or empty"),
    "positive": ("(is_count({0}) and tonumber({0}) >= 1)", f"{_COUNT}, above 0"),
    "number": ("is_count((string.gsub({0}, '^-', '')))", f"{_COUNT}, with or without a sign"),
    "digits": ("(#{0} <= 20 and string.find({0}, '^%d+$'))", "a decimal number of at most 20 digits"),
    "token": ("is_token({0})", "a lock token `owner:epoch`"),
    "base": ("({0} ~= '' and string.sub(KEYS[1], 1, #{0}) == {0})", "what the keys begin with"),
    "prefix": ("string.find({0}, '^furrow:.+:$')", "the beginning of keys"),
    "entry?": ("({0} == '' or (#{0} <= 31 and string.find({0}, '^%d+%-%d+$')))", "an id of a stream entry, or empty"),
    "choices": ("string.find({0}, '^[%d ]*$')", "numbers of choices"),
    "flag": ("({0} == '0' or {0} == '1')", "0 or 1"),
    "json": ("pcall(cjson.decode, {0})", "JSON"),
    "json?": ("({0} == '' or pcall(cjson.decode, {0}))", "JSON, or empty"),
    "list": ("is_list({0})", "a JSON list of texts"),
    "entry": ("is_entry({0})", "a log entry"),
}
"""Each kind but `text`, which anything is: its condition on the argument `{0}`, and its words."""


def refused(reply: str) -> str | None:
    """The reason in a server's error reply; None for another error."""
    match = _REFUSAL.search(reply)
    return match[1] if match else None


def checks(text: str, classes: tuple[str, ...]) -> tuple[str, str]:
    """The Lua that checks what a script's two lines say, "" where there are none; and the script without them."""
    lines: list[str] = []
    if keys := _KEYS.search(text):
        lines += _of_keys(keys[1].split())
    if arguments := _ARGUMENTS.search(text):
        kinds = (arguments[1] or "").split()
        lines += _of_arguments(list(kinds), classes)
        if model := _MODEL.search(text):
            lines += _of_model(f"ARGV[{kinds.index('base') + 1}]", model[1].split(), classes)
    for line in (_KEYS, _ARGUMENTS, _MODEL):
        text = line.sub("", text)
    return "".join(f"{line}\n" for line in lines), text


def _of_keys(kinds: list[str]) -> list[str]:
    if kinds[-1].endswith("…"):
        kind = kinds[-1].removesuffix("…")
        lines = _unless("#KEYS > 0", "'the number of keys'", "#KEYS", "1 or more")
        return [*lines, f"for i = {len(kinds)}, #KEYS do", f"  check_type(KEYS[i], '{kind}')", "end"]
    lines = _unless(f"#KEYS == {len(kinds)}", "'the number of keys'", "#KEYS", str(len(kinds)))
    return [*lines, *(f"check_type(KEYS[{i}], '{kind}')" for i, kind in enumerate(kinds, 1) if kind != "any")]


def _of_model(base: str, names: list[str], classes: tuple[str, ...]) -> list[str]:
    keys = [(name, _MODEL_TYPES[name]) for name in names if name != "classes"]
    if "classes" in names:
        keys += [("deadlines", "zset"), *((f"{count}:{name}", "zset") for name in classes for count in _OF_A_CLASS)]
    return [f"check_type({base} .. '{key}', '{kind}')" for key, kind in keys]


def _of_arguments(kinds: list[str], classes: tuple[str, ...]) -> list[str]:
    rest = kinds.pop().removesuffix("…") if kinds and kinds[-1].endswith("…") else None
    least = len(kinds)
    right = f"#ARGV == {least}"
    needed = str(least)
    if rest is not None:
        right = f"#ARGV >= {least} and #ARGV <= {_MOST}"
        needed = f"{least} to {_MOST}"
    first, paired, second = (rest or "").partition("=")
    if paired:
        right = f"{right} and (#ARGV - {least}) % 2 == 0"
        needed = f"{needed}, the last ones in pairs"
    lines = _unless(right, "'the number of arguments'", "#ARGV", needed)
    for i, kind in enumerate(kinds, 1):
        lines += _of_argument(kind, f"ARGV[{i}]", f"'argument {i}'", classes)
    step = 2 if paired else 1
    for offset, kind in enumerate((first, second)[:step] if rest is not None else ()):
        if inner := _of_argument(kind, "ARGV[i]", "'argument ' .. i", classes):
            lines += [f"for i = {least + 1 + offset}, #ARGV, {step} do", *(f"  {line}" for line in inner), "end"]
    return lines


def _of_argument(kind: str, argument: str, name: str, classes: tuple[str, ...]) -> list[str]:
    """`a|b` is one of these words; `class` one of the classes; `request:3` the rid whose hash is KEYS[3]."""
    if kind == "text":
        return []
    if kind == "class":
        kind = "|".join(classes)
    if "|" in kind:
        words = kind.split("|")
        condition = " or ".join(f"{argument} == '{word}'" for word in words)
        needed = f"one of {', '.join(words)}"
    elif kind.startswith("request:"):
        key = f"KEYS[{kind.removeprefix('request:')}]"
        condition = f"{argument} ~= '' and string.sub({key}, -#{argument} - 4) == 'req:' .. {argument}"
        needed = f"the id of the request {key}"
    else:
        condition, needed = _KINDS[kind]
    return _unless(condition.replace("{0}", argument), name, argument, needed)


def _unless(condition: str, name: str, value: str, needed: str) -> list[str]:
    return [f"if not ({condition}) then", f"  refuse({name}, {value}, '{needed}')", "end"]


_FOLDER = Path(__file__).parent
_INCLUDE = re.compile(r"^--@include (\w+)\n", re.MULTILINE)
_CONSTANTS: dict[str, int | str | tuple[str, ...]] = {
    **{name: value for name, value in vars(constants).items() if name.isupper()},
    "GROUP": keys.GROUP,
    "CLASSES": keys.CLASSES,
}

_ADMITTING = ("enqueue", "keep_response", "spend")
"""Scripts that take something new, and are refused by a server that is beyond its maxmemory."""
_READING = ("chain_of_response", "places", "position", "follow", "waiting_page")
"""Scripts that write nothing, or say themselves before which write they go on."""


@dataclass(frozen=True, slots=True)
class Script:
    """The text as the server sees it, and its SHA-1 for EVALSHA."""

    text: str
    sha: str


def compose(text: str) -> Script:
    """Expand the includes of `text`, put its checks in front, and declare the constants that it mentions."""
    check_lines, rest = checks(text, keys.CLASSES)
    front = "--@include check\n" + check_lines if check_lines else ""
    body = _INCLUDE.sub(lambda match: source(f"_{match[1]}"), front + rest)
    declared = [f"local {name} = {_literal(value)}" for name, value in _CONSTANTS.items() if name in body]
    whole = "\n".join([*declared, body])
    return Script(whole, hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest())


def _literal(value: int | str | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return "{" + ", ".join(f"'{item}'" for item in value) + "}"
    return f"'{value}'" if isinstance(value, str) else str(value)


def source(name: str) -> str:
    """The text of `name`.lua as it lies in the folder."""
    return _SOURCES[name]


_SOURCES = {path.stem: path.read_text() for path in sorted(_FOLDER.glob("*.lua"))}
"""All of them are read at the start: an upgrade may put the next build's files in their place."""


class Scripts(Mapping[str, Script]):
    """Every transition by name. Each is composed when it is first used: a process needs few of them at its start."""

    def __init__(self) -> None:
        self._composed: dict[str, Script] = {}
        self._names = [name for name in _SOURCES if not name.startswith("_")]

    def __getitem__(self, name: str) -> Script:
        script = self._composed.get(name)
        if script is None:
            goes_on = name not in _ADMITTING and name not in _READING
            script = compose(("--@include goes_on\n" if goes_on else "") + source(name))
            self._composed[name] = script
        return script

    def __setitem__(self, name: str, script: Script) -> None:
        """Use another text: for checks of what a script's parts are for."""
        self._composed[name] = script

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


SCRIPTS = Scripts()
