"""API keys: their records, limits and usage.

A key is one hash in Redis, found by the id in its secret. A secret reads `fk-<id>-<43 characters>`, of which the last
part is 256 random bits. So many can't be guessed, so one SHA-256 is all that the farm keeps of them: the slow hashes
that passwords need would only cost every request. Every change of a key counts a version up as its last step: a process
that keeps keys in memory looks at that one number.

Limits hold over all models and API processes: before a call is queued, `spend` takes a hold, an estimate for each of
its requests. In a Cluster one script can't touch keys of a model and of an API key. So the script that ends a request,
and emit now and then while it runs, add a settlement to a stream in the model's slot. Any API process reads it, applies
it to the key's bucket (`settle`) and deletes it. Applying one twice changes nothing, so no process has to own it.

Limits may be wrong for a minute, bills may not: the script that ends a request counts its usage, in one hash of the
model's slot for each UTC day with a field per key and kind. A reservation of the whole context would admit one request
a minute, so tokens beyond 1,024 a choice become a debt.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec

from control import keys
from control.bounds import refusal
from control.errors import KeyNotFound, RateLimited, SettingsError
from control.keys import CLASSES, TENANT_NAME, KeyKeys, ModelKeys
from control.records.catalog import as_fields, from_fields
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run, run_every

_SECRET = re.compile(r"fk-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_NUMBERS = ("rpm", "tpm", "max_concurrent", "expires")
LONGEST_NAME = 200


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """Kept as the fields of a hash. Times are Unix seconds, 0 for never; a limit of 0 is none."""

    id: str
    name: str
    tenant: str
    """The tenant under which its requests are scheduled and visible. Keys may share one; by default each has one."""
    sha256: str
    created: int
    admin: bool = False
    """True if it opens the operator's routes."""
    expires: int = 0
    revoked: int = 0
    rpm: int = 0
    """Requests per minute."""
    tpm: int = 0
    """Tokens per minute, prompts and answers together."""
    max_concurrent: int = 0
    """Requests that may wait or run at one time."""
    priority_cap: str = "high"
    """The best class that its requests may have."""
    models: list[str] = []
    """The models that it may use; empty: all."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            if (text := refusal(name, getattr(self, name))) is not None:
                raise SettingsError(f"{text} 0 means none.")
        if self.priority_cap not in CLASSES:
            raise SettingsError(f"priority cap {self.priority_cap!r} is unknown: use one of {', '.join(CLASSES)}")
        if not TENANT_NAME.fullmatch(self.tenant):
            raise SettingsError(
                f"tenant {self.tenant!r} can't be used: 1 to 64 letters, digits, '.', '_' and '-', no others"
            )
        if len(self.name) > LONGEST_NAME or not self.name.isprintable():
            raise SettingsError(f"a key's name has at most {LONGEST_NAME} printable characters")

    @property
    def limited(self) -> bool:
        """True if its requests are counted before they are admitted."""
        return bool(self.rpm or self.tpm or self.max_concurrent)

    def state(self, now: float) -> str:
        """`active`, `expired` or `revoked`, at a moment in Unix seconds."""
        if self.revoked:
            return "revoked"
        return "expired" if self.expires and now >= self.expires else "active"


def mint(
    *,
    name: str = "",
    tenant: str = "",
    admin: bool = False,
    expires: int = 0,
    rpm: int = 0,
    tpm: int = 0,
    max_concurrent: int = 0,
    priority_cap: str = "high",
    models: list[str] | None = None,
) -> tuple[ApiKey, str]:
    """A new key and its secret, which the farm does not store. Raises SettingsError for a value that can't be used."""
    key_id = secrets.token_hex(6)
    secret = f"fk-{key_id}-{secrets.token_urlsafe(32)}"
    now = int(time.time())
    if expires and expires <= now:
        raise SettingsError(f"the key would expire at {expires} (Unix seconds), which has passed")
    key = ApiKey(
        id=key_id,
        name=name or key_id,
        tenant=tenant or key_id,
        sha256=hash_secret(secret),
        created=now,
        admin=admin,
        expires=expires,
        rpm=rpm,
        tpm=tpm,
        max_concurrent=max_concurrent,
        priority_cap=priority_cap,
        models=sorted(set(models or [])),
    )
    return key, secret


def hash_secret(secret: str) -> str:
    """The hash that the farm stores of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def key_id_of(secret: str) -> str | None:
    """The id in a secret; None for a text that no key of this farm can be."""
    match = _SECRET.fullmatch(secret)
    return match[1] if match else None


REVOKED_DAYS = 90
"""Days for which a revoked key can still be shown."""


def create(client: SyncRedis, key: ApiKey) -> None:
    """Write a new key. Its id is listed first: a key that works must be in the list."""
    run(client, read("SADD", keys.API_KEYS, key.id, parse=int))
    _write(client, key)


def change(client: SyncRedis, key: ApiKey, **limits: object) -> ApiKey:
    """Give the key other limits, expiry or name; the key as it is then. Raises SettingsError."""
    changed = msgspec.structs.replace(key, **limits)
    _write(client, changed)
    return changed


def revoke(client: SyncRedis, key: ApiKey) -> ApiKey:
    """Refuse the key from about a second later on. Running requests go on; its record stays for REVOKED_DAYS."""
    if key.revoked:
        return key
    revoked = msgspec.structs.replace(key, revoked=int(time.time()))
    _write(client, revoked)
    run(client, read("EXPIRE", KeyKeys(key.id).record, REVOKED_DAYS * 86_400, parse=int))
    return revoked


def _write(client: SyncRedis, key: ApiKey) -> None:
    words = [word for pair in as_fields(key).items() for word in pair]
    run(client, read("HSET", KeyKeys(key.id).record, *words, parse=int))
    run(client, read("INCR", keys.API_KEYS_VERSION, parse=int))


def restore(key: ApiKey) -> list[Call[int]]:
    """Write back what Redis lacks of a key that an API process knows: all of it, or that it was revoked."""
    named = KeyKeys(key.id)
    fields = as_fields(key)
    calls = [read("SADD", keys.API_KEYS, key.id, parse=int)]
    calls += [read("HSETNX", named.record, name, value, parse=int) for name, value in fields.items()]
    if key.revoked:
        # A revocation stands, whatever a failover took back.
        calls.append(read("HSET", named.record, "revoked", key.revoked, parse=int))
        calls.append(read("EXPIRE", named.record, REVOKED_DAYS * 86_400, parse=int))
    return [*calls, read("INCR", keys.API_KEYS_VERSION, parse=int)]


def get(key_id: str) -> Call[ApiKey | None]:
    """The key of an id, whatever its state; None if there is none."""

    def parse(reply: dict[str, str]) -> ApiKey | None:
        return from_fields(reply, ApiKey) if reply else None

    return read("HGETALL", KeyKeys(key_id).record, parse=parse)


def version() -> Call[int]:
    """Grows with every change of any key; 0 before the first."""
    return read("GET", keys.API_KEYS_VERSION, parse=lambda reply: int(reply or 0))


def find(client: SyncRedis, id_or_name: str) -> ApiKey:
    """The key with this id, or the only one that works of this name. Raises KeyNotFound."""
    matches = [key for key, _ in list_keys(client) if id_or_name in (key.id, key.name)]
    if exact := [key for key in matches if key.id == id_or_name]:
        return exact[0]
    active = [key for key in matches if not key.revoked]
    if len(active) == 1:
        return active[0]
    if not matches:
        raise KeyNotFound(f"There is no API key {id_or_name!r}. `furrow keys list` shows those that there are.")
    ids = ", ".join(key.id for key in matches)
    raise KeyNotFound(f"{len(matches)} API keys have had the name {id_or_name!r}; say which one by its id: {ids}.")


def list_keys(client: SyncRedis) -> list[tuple[ApiKey, int]]:
    """Every key, oldest first, with the Unix second at which it was last used (to a minute or so), 0 for never."""
    ids = sorted(run(client, read("SMEMBERS", keys.API_KEYS, parse=set)))
    reads: list[Call[ApiKey | None] | Call[int]] = []
    for key_id in ids:
        reads += [get(key_id), _last_used(key_id)]
    replies = run_every(client, reads)
    keys_with_use = [(key, used) for key, used in zip(replies[::2], replies[1::2], strict=True) if key is not None]
    return sorted(keys_with_use, key=lambda one: (one[0].created, one[0].id))


def count() -> Call[int]:
    """The number of keys, revoked ones included."""
    return read("SCARD", keys.API_KEYS, parse=int)


def note_used(key_id: str, at: int) -> Call[str]:
    """Store when a key was used, beside its record: a write to the record would bring one back that has expired."""
    return read("SET", KeyKeys(key_id).used, at, "EX", 400 * 86_400, parse=str)


def _last_used(key_id: str) -> Call[int]:
    return read("GET", KeyKeys(key_id).used, parse=lambda reply: int(reply or 0))


@dataclass(frozen=True, slots=True)
class Allowance:
    """The remainder of a key's limits; 0 means no limit. `reset_*_ms`: time until that limit is whole again."""

    limit_requests: int
    remaining_requests: int
    reset_requests_ms: int
    limit_tokens: int
    remaining_tokens: int
    reset_tokens_ms: int


def spend(key: ApiKey, hold: str, model: str, estimates: Mapping[str, int]) -> Call[Allowance]:
    """Take one request and its estimated tokens for each of `estimates`, by request id. Sent twice, it takes once.

    Raises RateLimited, and takes nothing, where one of the limits has no room.
    """

    def parse(reply: list[Any]) -> Allowance:
        if reply[0] == "LIMIT":
            bound, wait_ms, *levels = reply[1:]
            limit = {"requests": key.rpm, "tokens": key.tpm, "concurrent": key.max_concurrent}[bound]
            raise RateLimited(bound, limit, int(wait_ms) / 1000, _allowance(key, levels))
        return _allowance(key, reply[1:])

    named = KeyKeys(key.id)
    words = [word for rid, tokens in estimates.items() for word in (rid, tokens)]
    args = (hold, key.rpm, key.tpm, key.max_concurrent, model, *words)
    return Call("spend", (named.bucket, named.spent(hold), named.open), args, parse)


def settle(key_id: str, hold: str, rid: str, tokens: int, *, ended: bool = True, counts: bool = True) -> Call[bool]:
    """The request took so many tokens: all of them once it has `ended`, else so far, and no less than was estimated.

    One that was refused `counts` as no request. False where it was settled before: a repeat changes nothing.
    """
    named = KeyKeys(key_id)
    args = (hold, rid, tokens, int(ended), int(counts))
    return Call("settle", (named.bucket, named.spent(hold), named.open, named.record), args, bool)


def open_requests(key: ApiKey) -> Call[dict[str, tuple[int, str]]]:
    """Of a key with `max_concurrent`: hold → (ms at which it began, model) of what holds its places."""

    def parse(reply: dict[str, str]) -> dict[str, tuple[int, str]]:
        pairs = {rid: text.split(" ", 1) for rid, text in reply.items()}
        return {rid: (int(began), model) for rid, (began, model) in pairs.items()}

    return read("HGETALL", KeyKeys(key.id).open, parse=parse)


def free_places(key: ApiKey, rids: Sequence[str]) -> Call[int]:
    """Free the places of requests that have ended without a settlement; their estimates stand."""
    return read("HDEL", KeyKeys(key.id).open, *rids, parse=int)


def _allowance(key: ApiKey, levels: list[Any]) -> Allowance:
    requests, requests_ms, tokens, tokens_ms = map(int, levels)
    return Allowance(key.rpm, requests, requests_ms, key.tpm, tokens, tokens_ms)


MOST_READ = 128
"""Settlements read in one call."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """`tokens` are all that request `rid` took, or so far if it has not ended; `id` is its place in the stream."""

    id: str
    key_id: str
    hold: str
    rid: str
    tokens: int
    ended: bool

    def apply(self) -> Call[bool]:
        """Charge `tokens` instead of the estimate; False where that was done before."""
        return settle(self.key_id, self.hold, self.rid, self.tokens, ended=self.ended)


def pending(model: str) -> Call[list[Settlement]]:
    """The oldest MOST_READ settlements of a model that nobody has deleted."""

    def parse(reply: list[tuple[str, dict[str, str]]] | None) -> list[Settlement]:
        return [
            Settlement(
                entry, fields["key"], fields["hold"], fields["rid"], int(fields["tokens"]), fields["ended"] == "1"
            )
            for entry, fields in reply or []
        ]

    return read("XRANGE", ModelKeys(model).settlements, "-", "+", "COUNT", MOST_READ, parse=parse)


def forget(model: str, settlements: Sequence[Settlement]) -> Call[int]:
    """Delete settlements that were applied."""
    return read("XDEL", ModelKeys(model).settlements, *(settlement.id for settlement in settlements), parse=int)


def metered_models() -> Call[set[str]]:
    """Every model that was ever loaded, unloaded ones included: they may have settlements, and their usage counts."""
    return read("SMEMBERS", keys.METERED, parse=set)


KINDS = ("requests", "prompt", "cached", "completion")
_EPOCH = date(1970, 1, 1)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of one model by one key on one day (UTC); `cached_tokens` of the prompts' tokens were not computed."""

    key: str
    date: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def days(count: int) -> list[date]:
    """The last `count` days, today (UTC) included, oldest first."""
    today = datetime.now(UTC).date()
    return [today - timedelta(days=back) for back in reversed(range(count))]


def usage_of_key(model: str, key: str, day: date) -> Call[Usage | None]:
    """One key's; None where it did nothing."""

    def parse(reply: Sequence[str | None]) -> Usage | None:
        counts = [int(value or 0) for value in reply]
        return _usage(key, model, day, counts) if any(counts) else None

    fields = [f"{key}:{kind}" for kind in KINDS]
    return read("HMGET", ModelKeys(model).usage(_number(day)), *fields, parse=parse)


def usage_of_day(model: str, day: date) -> Call[list[Usage]]:
    """Every key's, in order of id."""

    def parse(reply: dict[str, str]) -> list[Usage]:
        named = sorted({field.rpartition(":")[0] for field in reply})
        counts = {key: [int(reply.get(f"{key}:{kind}", 0)) for kind in KINDS] for key in named}
        return [_usage(key, model, day, counts[key]) for key in named]

    return read("HGETALL", ModelKeys(model).usage(_number(day)), parse=parse)


def usage(client: SyncRedis, count: int, key: str | None = None) -> list[Usage]:
    """Of the last `count` days, oldest first: one key's, or everybody's. Raises RedisUnavailable."""
    models = sorted(run(client, metered_models()))
    if key is not None:
        days_of_models = run_every(client, [usage_of_key(model, key, day) for day in days(count) for model in models])
        return [record for record in days_of_models if record is not None]
    days_of_models = run_every(client, [usage_of_day(model, day) for day in days(count) for model in models])
    return [record for usages in days_of_models for record in usages]


def _number(day: date) -> int:
    return (day - _EPOCH).days


def _usage(key: str, model: str, day: date, counts: list[int]) -> Usage:
    requests, prompt, cached, completion = counts
    return Usage(
        key=key,
        date=day.isoformat(),
        model=model,
        requests=requests,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
    )
