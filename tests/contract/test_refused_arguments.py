"""A script that fails has written nothing: each one, with hostile arguments and with keys of the wrong type."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
from redis import exceptions as redis_errors

from control.errors import ArgumentsRefused
from control.redis.connection import Call, connect
from control.scripts import SCRIPTS, refused, source
from tests.contract.calls import CALLS, Scene
from tests.contract.conftest import Farm

Words = tuple[list[Any], list[Any]]

HOSTILE: tuple[Any, ...] = (
    "",
    " ",
    "nan",
    "inf",
    "-1",
    "1.5",
    "1e17",
    "0x10",
    "9" * 16,
    "9" * 400,
    b"\xff\x00{}",
    "x y",
)
HOSTILE += ("[]", "{}", "[[]]", '[["run"]]', '{"a":', "null", "[1,2]", "-9223372036854775809", "1e999", "y" * 9000)
ROWS = (
    '[["run",2,"",1,["[2,0,5]"],["t"]]]',
    '[["run",2,"",1,["[2,0,5]"],[]],["gone"]]',
    '[["run",2,"",1,["[2,0,5]"],[]],5]',
    '[["run",2,"",1,["[2,0,5]"],[]],["wait",1,"",0,{"a":1},[]]]',
    '[["run",2,"done",1,["[2,0,5]"],[]]]',
    '[["run",1e17,"",1,["[2,0,5]"],[]]]',
    '[["run",2,"",1e400,["[2,0,5]"],[]]]',
    '[["run",2,"",1,[5,6],[]]]',
    '[["run",2,null,1,["[2,0,5]"],[]]]',
    '[["run",2,"",1,["[2,0,5]",{}],[]]]',
    '{"0":["run",2,"",1,["[2,0,5]"],[]]}',
    '[["run",2,"",1,["[2,0,5]"],["a",{}]]]',
    '[["run",2,"",1,["[2,0,5]"],[],[]],["run",3,"",1,["[3,0,5]"],["b"],[],7]]',
)
"""Steps whose shape is wrong somewhere behind a row that could be written."""
OF_MANY = ("adopt", "claim", "reap", "retire", "takeover")
"""Scripts that are about many requests. Each request is done with before the next is looked at, so what the keys of one
request do wrong is found behind the others."""
HOT = ("claim", "emit")
"""Scripts of every step: to look at the type of each key that they may write would make them slower by half."""
COUNTS = (-1, 1, 8000)
SNAPSHOT = """
local now, found = redis.call('TIME'), {}
-- A table's order changes while it is only read, so that its DUMP is another.
local function content(key)
  local kind, lines = redis.call('TYPE', key).ok, {}
  if kind == 'hash' then
    local flat = redis.call('HGETALL', key)
    for i = 1, #flat, 2 do
      lines[#lines + 1] = flat[i] .. ' = ' .. flat[i + 1]
    end
  elseif kind == 'set' then
    lines = redis.call('SMEMBERS', key)
  elseif kind == 'zset' then
    return table.concat(redis.call('ZRANGE', key, 0, -1, 'WITHSCORES'), ' ')
  else
    return redis.call('DUMP', key)
  end
  table.sort(lines)
  return table.concat(lines, ', ')
end
for i, key in ipairs(redis.call('KEYS', '*')) do
  local left = redis.call('PTTL', key)
  local lapses = left >= 0 and now[1] * 1000 + now[2] / 1000 + left or left
  found[i] = {key, redis.sha1hex(content(key)), string.format('%.0f', lapses)}
end
return found
"""
SAVED = """
local now, found = redis.call('TIME'), {}
for i, key in ipairs(redis.call('KEYS', '*')) do
  local left = redis.call('PTTL', key)
  local lapses = left >= 0 and now[1] * 1000 + now[2] / 1000 + left or 0
  found[i] = {key, string.format('%.0f', lapses), redis.call('DUMP', key)}
end
return found
"""
RESTORE = """
redis.call('FLUSHDB')
for i, key in ipairs(KEYS) do
  redis.call('RESTORE', key, ARGV[2 * i - 1], ARGV[2 * i], 'ABSTTL')
end
"""
SLACK_MS = 2_000
"""Times to live are told at two moments, between which a machine may pause."""

Snapshot = dict[bytes, tuple[bytes, int]]


@pytest.fixture(params=["old", "new"])
def farm(request: pytest.FixtureRequest) -> Iterator[Farm]:
    """On real servers: what a script leaves behind when it fails is theirs."""
    with closing(connect(request.getfixturevalue(f"{request.param}_server").url)) as client:
        client.flushall()
        settings = client.connection_pool.connection_kwargs | {"decode_responses": False}
        pool = redis.ConnectionPool(connection_class=client.connection_pool.connection_class, **settings)
        with closing(redis.Redis.from_pool(pool)) as raw:
            raw.set_response_callback("INFO", bytes)  # for `changes`, which reads one line of many
            yield Farm(client, raw, None)


def words_of(call: Call[Any]) -> Words:
    return list(call.keys), list(call.args)


def evaluate(farm: Farm, text: str, keys: list[Any], args: list[Any]) -> Any:
    """The result of a script's text, which the server gets once."""
    try:
        return farm.blocking.evalsha(hashlib.sha1(text.encode()).hexdigest(), len(keys), *keys, *args)
    except redis_errors.NoScriptError:
        return farm.blocking.execute_command("EVAL", text, len(keys), *keys, *args)


def send(farm: Farm, text: str, words: Words) -> Exception | None:
    """Run a script's text; the error that it ended with."""
    try:
        evaluate(farm, text, *words)
    except redis_errors.ResponseError as error:
        return error
    return None


def changes(info: bytes) -> int:
    """The server's count of changes: every command that changes a key adds to it."""
    count = re.search(rb"rdb_changes_since_last_save:(\d+)", info)
    assert count is not None, info
    return int(count[1])


def send_and_count(farm: Farm, digest: str, words: Words) -> tuple[Exception | None, int]:
    """As `send` for a script that the server has, and the count of changes after it, in one round trip."""
    keys, args = words
    with farm.blocking.pipeline(transaction=False) as commands:
        commands.evalsha(digest, len(keys), *keys, *args)
        commands.info("persistence")
        result, info = commands.execute(raise_on_error=False)
    if isinstance(result, Exception) and not isinstance(result, redis_errors.ResponseError):
        raise result
    return result if isinstance(result, Exception) else None, changes(info)


def snapshot(farm: Farm) -> Snapshot:
    """Of every key a digest of its value, and the moment at which it lapses (-1: never)."""
    return {key: (digest, int(lapses)) for key, digest, lapses in evaluate(farm, SNAPSHOT, [], [])}


def saved(farm: Farm) -> list[tuple[bytes, int, bytes]]:
    """Every key, the moment at which it lapses (0: never) and its value as the server writes it."""
    return [(key, int(lapses), value) for key, lapses, value in evaluate(farm, SAVED, [], [])]


def restore(farm: Farm, keys: list[tuple[bytes, int, bytes]]) -> None:
    """Those keys and no others."""
    evaluate(farm, RESTORE, [key for key, _, _ in keys], [part for _, *parts in keys for part in parts])


def changed(before: Snapshot, after: Snapshot) -> list[bytes]:
    """The keys that are not as they were."""
    return sorted(
        key
        for key in before.keys() | after.keys()
        if key not in before
        or key not in after
        or before[key][0] != after[key][0]
        or abs(before[key][1] - after[key][1]) > SLACK_MS
    )


def mutated(words: Words, draw: random.Random) -> Iterator[tuple[str, Words]]:
    """The call with one thing wrong, or a few."""
    keys, args = words
    for i in range(len(args)):
        values = HOSTILE + (ROWS if isinstance(args[i], bytes) and args[i].startswith(b"[[") else ())
        for value in values:
            yield f"argument {i + 1} is {value[:60]!r}", (keys, [*args[:i], value, *args[i + 1 :]])
    for more in COUNTS:
        changed = args[:more] if more < 0 else [*args, *(["x"] * more)]
        yield f"{len(changed)} arguments", (keys, changed)
    yield "no arguments", (keys, [])
    for i in range(len(keys)):
        yield f"key {i + 1} is absent", ([*keys[:i], "furrow:{m}:x", *keys[i + 1 :]], args)
    yield "a key more", ([*keys, keys[0]], args)
    yield "a key less", (keys[:-1], args)
    for _ in range(10):
        some = list(args)
        for i in range(len(some)):
            if draw.random() < 0.4:
                some[i] = draw.choice(HOSTILE)
        yield "several arguments", (keys, some)


def hostile_calls(farm: Farm, name: str, text: str) -> Iterator[tuple[str, Exception]]:
    """Each call that failed, after it was seen that nothing had changed."""
    words = words_of(CALLS[name](Scene(farm)))
    scene, before, digest = saved(farm), snapshot(farm), farm.client.script_load(text)
    count = changes(farm.blocking.execute_command("INFO", "persistence"))
    for what, mutation in mutated(words, random.Random(7)):
        error, written = send_and_count(farm, digest, mutation)
        if error is not None:
            unchanged = written == count or changed(before, snapshot(farm)) == []
            assert unchanged, f"{name} failed ({error}) where {what}, and had written"
            yield what, error
        elif written != count:  # it took what it was given: the next case meets the same scene anew
            restore(farm, scene)
            written = changes(farm.blocking.execute_command("INFO", "persistence"))
        count = written


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_that_fails_has_written_nothing(farm: Farm, name: str) -> None:
    """Whatever an argument is, an error leaves every key and its life as they were, and says what is wrong."""
    reasons = [(what, str(error)) for what, error in hostile_calls(farm, name, SCRIPTS[name].text)]
    assert reasons, "nothing was refused"
    if name != "write":  # one command, whose errors are its own
        assert [reason for reason in reasons if refused(reason[1]) is None] == []


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_valid_call_is_taken(farm: Farm, name: str) -> None:
    """The call that the others are made from is none of them."""
    call = CALLS[name](Scene(farm))
    assert send(farm, SCRIPTS[name].text, words_of(call)) is None


def part_of_a_request(key: str) -> bool:
    return any(part in key for part in (":req:", ":log:", ":queue:"))


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_key_of_the_wrong_type_costs_nothing_else(farm: Farm, name: str) -> None:
    """Each key that the call writes or that is there, one after the other, holds something else."""
    call = CALLS[name](Scene(farm))
    words, scene, there = words_of(call), saved(farm), set(farm.client.keys("*"))
    send(farm, SCRIPTS[name].text, words)
    for key in sorted(there | set(farm.client.keys("*")) | set(call.keys)):
        if key not in call.keys and (name in HOT or (name in OF_MANY and part_of_a_request(key))):
            continue
        restore(farm, scene)
        other = farm.client.type(key) in ("string", "none") and not key.endswith((":lock", ":epoch"))
        farm.client.delete(key)
        farm.client.sadd(key, "x") if other else farm.client.set(key, "x:1")
        before = snapshot(farm)
        error = send(farm, SCRIPTS[name].text, words)
        assert error is None or changed(before, snapshot(farm)) == [], (
            f"{name} failed ({error}) with another {key}, and had written"
        )


def test_control_a_write_before_the_checks_is_found(farm: Farm) -> None:
    """Where the checks of a script are cut out, or come after a write, the first test fails."""
    whole = SCRIPTS["enqueue"].text
    late = "redis.call('HINCRBY', KEYS[1], 'queued', 1)\n" + whole
    unchecked = re.sub(r"(?m)^(  )*refuse\(.*\)$", "", whole)
    for text in (late, unchecked):
        assert text != whole
        with pytest.raises(AssertionError, match="and had written"):
            list(hostile_calls(farm, "enqueue", text))


def test_a_refusal_is_an_error_of_its_own(farm: Farm) -> None:
    """A caller can tell it from a server's trouble; it names the script, the argument and the value."""
    wrong = Call("poison", (farm.keys.replica("r0").poison,) * 3, ("1e17", 0, "k", "m", farm.keys.base), bool)
    with pytest.raises(ArgumentsRefused, match=r"'poison' refused a call: argument 1 \"1e17\" is not a whole number"):
        farm.run(wrong)
    assert farm.client.keys("*") == []


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_script_says_what_it_takes(name: str) -> None:
    """A new script has both lines, and a call in calls.py."""
    text = source(name)
    assert re.search(r"^--@keys \S", text, re.M) and re.search(r"^--@arguments", text, re.M)
    assert name in CALLS
