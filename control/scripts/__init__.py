"""The atomic transitions, one Lua file each, and their loader.

Each file's header lists its KEYS and ARGV with types. The loader does two things to the text and no more: a line
`--@include name` is replaced by the file `_name.lua`, and the constants of keys.py that the script mentions are
declared in front of it, so that a life time or a stream's length is written down once.

Rules that hold for all of them: only commands of Redis 6.2; never KEYS or SCAN; the server's TIME is the only clock;
numbers leave Lua through `whole`, because Lua's own formatting turns a millisecond stamp into 1.7e+12; a script may be
sent twice (the first reply can be lost) and then answers the same.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from control import keys

_FOLDER = Path(__file__).parent
_INCLUDE = re.compile(r"^--@include (\w+)\n", re.MULTILINE)
_CONSTANTS = (
    "LOCK_MS",
    "RANK_BEAT_MS",
    "COMMAND_MS",
    "COMMAND_LENGTH",
    "BELL_LENGTH",
    "POISONS_LENGTH",
    "DEAD_LENGTH",
    "RETENTION_MS",
    "LOOK_AFTER_MS",
    "RESPONSE_OVERHEAD",
    "SUSPECTS_MS",
    "TRIAL_MS",
    "GROUP",
    "CLASSES",
    "PASSED_OVER",
    "HAND_OUT",
    "DEBT_MS",
    "SPENT_MS",
    "SETTLE_TOKENS",
    "USAGE_MS",
)


@dataclass(frozen=True, slots=True)
class Script:
    """The text as the server sees it, and its SHA-1 for EVALSHA."""

    text: str
    sha: str


def compose(text: str) -> Script:
    """Expand the includes of `text` and declare the constants that it mentions."""
    body = _INCLUDE.sub(lambda match: (_FOLDER / f"_{match[1]}.lua").read_text(), text)
    declared = [f"local {name} = {_literal(getattr(keys, name))}" for name in _CONSTANTS if name in body]
    whole = "\n".join([*declared, body])
    return Script(whole, hashlib.sha1(whole.encode(), usedforsecurity=False).hexdigest())


def _literal(value: int | str | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return "{" + ", ".join(f"'{item}'" for item in value) + "}"
    return f"'{value}'" if isinstance(value, str) else str(value)


def source(name: str) -> str:
    """The text of `name`.lua as it lies in the folder."""
    return (_FOLDER / f"{name}.lua").read_text()


SCRIPTS: dict[str, Script] = {path.stem: compose(path.read_text()) for path in sorted(_FOLDER.glob("[!_]*.lua"))}
"""Every transition by name."""
