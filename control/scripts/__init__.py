"""Lua scripts as such: their files, rules, checks of arguments and bounds of work, and the code that loads them.

Each file's header lists its KEYS and ARGV with types. The loader changes the text in three ways. A line
`--@include name` is replaced by the file `_name.lua`. The lines `--@keys`, `--@arguments` and `--@model` are replaced
by the checks that a script makes before its first write (arguments.py). The constants of control/constants.py that the
script mentions, and the names of classes and group, are declared at its beginning, so that each is written down once.
A script that continues admitted work begins with `_goes_on.lua`, so that a server beyond its maxmemory refuses new
work alone.

Rules that hold for all of them: only commands of Redis 6.2; never KEYS or SCAN; the server's TIME is the only clock;
numbers leave Lua through `whole`, because Lua's own formatting turns a millisecond stamp into 1.7e+12; a script may be
sent twice (the first reply can be lost) and then answers the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from control import constants, keys
from control.scripts.arguments import checks

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
    made, rest = checks(text, keys.CLASSES)
    front = "--@include check\n" + made if made else ""
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
