"""Lua scripts follow their rules: the files as texts."""

from __future__ import annotations

import re

import pytest

from control import scripts
from control.constants import RETENTION_MS
from control.keys import GROUP

COMMANDS_OF_6_2 = """
DEL EXISTS GET HDEL HEXISTS HGET HGETALL HINCRBY HKEYS
HLEN HMGET HSET HSTRLEN HVALS INFO PEXPIRE PTTL PUBLISH RENAME SET TIME TYPE UNLINK
XACK XADD XCLAIM XDEL XGROUP XINFO XLEN XPENDING XRANGE XREADGROUP XREVRANGE
ZADD ZCARD ZINCRBY ZRANGE ZRANGEBYLEX ZRANGEBYSCORE ZREM ZREMRANGEBYSCORE ZREVRANGE ZSCORE
"""


def test_a_script_is_composed_when_it_is_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once: a process needs few of them, and all take its start 10 ms."""
    composed: list[str] = []

    def compose(text: str) -> scripts.Script:
        composed.append(text)
        return scripts.Script(text, "")

    monkeypatch.setattr(scripts, "compose", compose)
    fresh = scripts.Scripts()
    assert sorted(fresh) == sorted(scripts.SCRIPTS) and not composed
    assert fresh["emit"] is fresh["emit"]
    assert len(composed) == 1


@pytest.mark.parametrize("name", sorted(scripts.SCRIPTS))
def test_a_script_uses_what_redis_6_2_has(name: str) -> None:
    """Nothing newer, and never a walk over the key space."""
    used = set(re.findall(r"redis\.p?call\('(\w+)'", scripts.SCRIPTS[name].text))
    used |= set(re.findall(r"= \{'([A-Z]+)', ", scripts.SCRIPTS[name].text)) & {"HSET"}
    assert used
    assert used <= set(COMMANDS_OF_6_2.split())


@pytest.mark.parametrize("name", sorted(scripts.SCRIPTS))
def test_a_script_says_what_it_takes_and_returns(name: str) -> None:
    """The header lists KEYS, ARGV where there are any, and the answer."""
    header = scripts.source(name).split("\nlocal")[0]
    assert header.startswith("-- ")
    assert re.search(r"^-- KEYS 1", header, re.MULTILINE)
    assert re.search(r"^-- Returns ", header, re.MULTILINE)
    if "ARGV" in scripts.source(name).replace(header, ""):
        assert re.search(r"^-- ARGV ", header, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(scripts.SCRIPTS))
def test_every_include_was_found(name: str) -> None:
    """No include is left over, and everything that a script calls is defined in it."""
    text = scripts.SCRIPTS[name].text
    assert "--@include" not in text
    defined = set(re.findall(r"local function (\w+)", text)) | {
        "ipairs",
        "next",
        "pairs",
        "tonumber",
        "tostring",
        "unpack",
        "type",
        "function",
        "error",
        "pcall",
    }
    code = re.sub(r"--.*|'[^']*'", "", text)
    assert set(re.findall(r"(?<![.\w])([a-z_]+)\(", code)) <= defined


def test_a_script_declares_the_constants_that_it_mentions() -> None:
    """And no others."""
    script = scripts.compose("return {GROUP, RETENTION_MS}")
    assert (
        script.text == f"local RETENTION_MS = {RETENTION_MS}\nlocal GROUP = '{GROUP}'\nreturn {{GROUP, RETENTION_MS}}"
    )


def test_another_text_is_another_script() -> None:
    """The name that a server knows a script by is its text's digest."""
    assert scripts.compose("return 1").sha != scripts.compose("return 2").sha
