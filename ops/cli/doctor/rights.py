"""The rights of the URL's user: every command of Furrow is tried once, on keys that are deleted at once."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import Any

import msgspec
from redis import exceptions as redis_errors

from control.errors import RedisDenied, RedisUnavailable
from control.keys import PREFIX
from control.operations.checks.findings import Checks
from control.operations.checks.redis_server import REFUSED_WRITES
from control.redis.clients import SyncRedis, credentials_of
from control.redis.connection import read, run
from control.redis.transient import lacks_right

PROBES: dict[str, tuple[str, ...]] = {
    "TIME": (),
    "PING": (),
    "SET": ("{key}:text", "1", "PX", "5000"),
    "GET": ("{key}:text",),
    "INCR": ("{key}:text",),
    "EXISTS": ("{key}:text",),
    "PEXPIRE": ("{key}:text", "5000"),
    "EXPIRE": ("{key}:text", "5"),
    "PTTL": ("{key}:text",),
    "TYPE": ("{key}:text",),
    "HSET": ("{key}:hash", "a", "1"),
    "HSETNX": ("{key}:hash", "a", "1"),
    "HGET": ("{key}:hash", "a"),
    "HMGET": ("{key}:hash", "a"),
    "HGETALL": ("{key}:hash",),
    "HKEYS": ("{key}:hash",),
    "HVALS": ("{key}:hash",),
    "HLEN": ("{key}:hash",),
    "HEXISTS": ("{key}:hash", "a"),
    "HSTRLEN": ("{key}:hash", "a"),
    "HINCRBY": ("{key}:hash", "a", "1"),
    "HDEL": ("{key}:hash", "a"),
    "SADD": ("{key}:set", "a"),
    "SCARD": ("{key}:set",),
    "SISMEMBER": ("{key}:set", "a"),
    "SMEMBERS": ("{key}:set",),
    "SREM": ("{key}:set", "a"),
    "ZADD": ("{key}:zset", "1", "a"),
    "ZINCRBY": ("{key}:zset", "1", "a"),
    "ZSCORE": ("{key}:zset", "a"),
    "ZCARD": ("{key}:zset",),
    "ZRANGE": ("{key}:zset", "0", "0"),
    "ZREVRANGE": ("{key}:zset", "0", "0"),
    "ZREVRANK": ("{key}:zset", "a"),
    "ZREMRANGEBYRANK": ("{key}:zset", "5", "6"),
    "ZRANK": ("{key}:zset", "a"),
    "ZRANGEBYLEX": ("{key}:zset", "-", "+"),
    "ZRANGEBYSCORE": ("{key}:zset", "0", "1"),
    "ZSCAN": ("{key}:zset", "0"),
    "ZREM": ("{key}:zset", "a"),
    "XADD": ("{key}:stream", "1-0", "a", "b"),
    "XGROUP": ("CREATE", "{key}:stream", "g", "0"),
    "XREADGROUP": ("GROUP", "g", "c", "COUNT", "1", "STREAMS", "{key}:stream", ">"),
    "XREAD": ("COUNT", "1", "STREAMS", "{key}:stream", "0"),
    "XCLAIM": ("{key}:stream", "g", "c", "0", "1-0"),
    "XACK": ("{key}:stream", "g", "1-0"),
    "XINFO": ("STREAM", "{key}:stream"),
    "XLEN": ("{key}:stream",),
    "XRANGE": ("{key}:stream", "-", "+"),
    "XREVRANGE": ("{key}:stream", "+", "-"),
    "XDEL": ("{key}:stream", "1-0"),
    "PUBLISH": ("{key}:events", ""),
    "RENAME": ("{key}:text", "{key}:other"),
    "UNLINK": ("{key}:hash", "{key}:set", "{key}:zset"),
    "DEL": ("{key}:stream", "{key}:text", "{key}:other"),
}
"""Command → harmless words. Commands of scripts and others have the same rights."""
_TRY = """
local found = {}
for index, probe in ipairs(cjson.decode(ARGV[1])) do
  local answer = redis.pcall(unpack(probe))
  found[index] = type(answer) == 'table' and answer.err or ''
end
return found
"""
_KEYS = ("text", "other", "hash", "set", "zset", "stream")


def check_rights(client: SyncRedis, checks: Checks) -> bool:
    """True if Furrow can work with the user's rights, on a server that takes writes. Raises RedisUnavailable."""
    key = f"{PREFIX}{{doctor}}:{uuid.uuid4().hex}"
    if said := _refused_write(client, f"{key}:text"):
        remedy = next(remedy for word, remedy in REFUSED_WRITES.items() if word in said)
        checks.error("writes", f"the server refuses writes: {said}", remedy)
        return False
    denied = _denied(client, key)
    denied |= _subscribing(client, f"{key}:events")
    for command, words in (("EVALSHA", ("0" * 40, 0)), ("INFO", ())):
        denied |= _refusal(command, _attempt(client, command, *words))
    if not denied:
        checks.ok("rights", "the user may run every command on Furrow's keys")
        return True
    commands = sorted(name.lower() for name, what in denied.items() if what == "command")
    words = [f"+{name}" for name in commands]
    subjects = [f"the command{'s' if len(commands) > 1 else ''} {', '.join(commands)}"] if commands else []
    if "key" in denied.values():
        words.append(f"'~{PREFIX}*'")
        subjects.append(f"the keys {PREFIX}*")
    if "channel" in denied.values():
        words.append(f"'&{PREFIX}*'")
        subjects.append(f"the channels {PREFIX}*")
    user = _user(client)
    remedy = f"Run `redis-cli ACL SETUSER {user} {' '.join(words)}` and `redis-cli ACL SAVE`, or edit the ACL file."
    # Without INFO the checks of the server are missing, and a lock that ran out is not taken again.
    level = "warning" if commands == ["info"] and len(subjects) == 1 else "error"
    checks.judge(level, "rights", f"the user '{user}' may not use {' and '.join(subjects)}", remedy)
    return level == "warning"


def _refused_write(client: SyncRedis, key: str) -> str:
    """What the server says to a plain write where it refuses all of them, else nothing: the scripts of Redis 6.2 may
    write even so."""
    try:
        client.set(key, "1", px=5000)
        client.delete(key)
    except redis_errors.ResponseError as error:
        return str(error) if any(word in str(error) for word in REFUSED_WRITES) else ""
    return ""


def _denied(client: SyncRedis, key: str) -> dict[str, str]:
    """Command → the kind of right that it lacks: command, key or channel."""
    probes = [[name, *(word.replace("{key}", key) for word in words)] for name, words in PROBES.items()]
    keys = [f"{key}:{name}" for name in _KEYS]
    answer = _attempt(client, "EVAL", _TRY, len(keys), *keys, msgspec.json.encode(probes).decode())
    if isinstance(answer, Exception):
        return _refusal("EVAL", answer)
    refusals: dict[str, str] = {}
    for name, said in zip(PROBES, answer, strict=True):
        refusals |= _refusal(name, redis_errors.ResponseError(said))
    return refusals


def _attempt(client: SyncRedis, *words: Any) -> Any:
    """The answer, or the server's error."""
    try:
        return run(client, read(*words, parse=lambda reply: reply))
    except (redis_errors.ResponseError, RedisDenied) as error:
        return error


def _refusal(command: str, answer: Any) -> dict[str, str]:
    """The right that an error names; empty for any other answer."""
    if not isinstance(answer, RedisDenied) and not (isinstance(answer, Exception) and lacks_right(answer)):
        return {}
    said = str(answer).lower()
    return {command: "channel" if "channel" in said else "key" if "key" in said else "command"}


def _subscribing(client: SyncRedis, channel: str) -> dict[str, str]:
    pubsub = client.pubsub()
    try:
        pubsub.subscribe(channel)
        pubsub.get_message(timeout=1.0)
    except redis_errors.ResponseError as error:
        return _refusal("SUBSCRIBE", error)
    except redis_errors.RedisError:  # the connection is of no use; others have told so
        return {}
    finally:
        pubsub.close()
    return {}


def _user(client: SyncRedis) -> str:
    """The name of the connection's user."""
    with suppress(redis_errors.ResponseError, RedisUnavailable):
        return str(run(client, read("ACL", "WHOAMI", parse=str)))
    return credentials_of(client)[0]
