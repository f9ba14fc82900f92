"""API keys in Redis: one hash each, found by the id in the secret.

Every change counts a version up, last of all its steps: whoever keeps keys in memory looks at that one number.
"""

from __future__ import annotations

import time

import msgspec

from control import keys
from control.access.record import ApiKey
from control.errors import KeyNotFound
from control.keys import KeyKeys
from control.records.catalog import as_fields, from_fields
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run, run_every

REVOKED_DAYS = 90
"""Days for which a revoked key can still be shown."""


def create(client: SyncRedis, key: ApiKey) -> None:
    """Write a new key. Its id becomes known first: a key that works must be in the list."""
    run(client, read("SADD", keys.API_KEYS, key.id, parse=int))
    _write(client, key)


def change(client: SyncRedis, key: ApiKey, **limits: object) -> ApiKey:
    """Give the key other limits, expiry or name; the key as it is then. Raises SettingsError."""
    changed = msgspec.structs.replace(key, **limits)
    _write(client, changed)
    return changed


def revoke(client: SyncRedis, key: ApiKey) -> ApiKey:
    """From within a second on, nobody gets in with it; what runs goes on. Its record stays for a while."""
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


def find(client: SyncRedis, named: str) -> ApiKey:
    """The key with this id, or the only one that works of this name. Raises KeyNotFound."""
    matches = [key for key, _ in list_keys(client) if named in (key.id, key.name)]
    if exact := [key for key in matches if key.id == named]:
        return exact[0]
    active = [key for key in matches if not key.revoked]
    if len(active) == 1:
        return active[0]
    if not matches:
        raise KeyNotFound(f"There is no API key {named!r}. `furrow keys list` shows those that there are.")
    ids = ", ".join(key.id for key in matches)
    raise KeyNotFound(f"{len(matches)} API keys have had the name {named!r}; say which one by its id: {ids}.")


def list_keys(client: SyncRedis) -> list[tuple[ApiKey, int]]:
    """Every key, oldest first, with the Unix second at which it was last used (to a minute or so), 0 for never."""
    ids = sorted(run(client, read("SMEMBERS", keys.API_KEYS, parse=set)))
    reads: list[Call[ApiKey | None] | Call[int]] = []
    for key_id in ids:
        reads += [get(key_id), _last_used(key_id)]
    replies = run_every(client, reads)
    listed = [(key, used) for key, used in zip(replies[::2], replies[1::2], strict=True) if key is not None]
    return sorted(listed, key=lambda one: (one[0].created, one[0].id))


def count() -> Call[int]:
    """How many keys there are, revoked ones included."""
    return read("SCARD", keys.API_KEYS, parse=int)


def note_used(key_id: str, at: int) -> Call[str]:
    """Keep when a key was used, in a place of its own: it must not bring a record back that has gone."""
    return read("SET", KeyKeys(key_id).used, at, "EX", 400 * 86_400, parse=str)


def _last_used(key_id: str) -> Call[int]:
    return read("GET", KeyKeys(key_id).used, parse=lambda reply: int(reply or 0))
