"""Who may use the farm, how much of it, and how much they used: API keys, their limits, their usage."""

from __future__ import annotations

from control.access.limits import Allowance, free_places, open_requests, settle, spend
from control.access.record import ApiKey, hash_secret, key_id_of, mint
from control.access.rule import asks_for_key, why_asked
from control.access.store import change, count, create, find, get, list_keys, note_used, restore, revoke, version
from control.access.usage import Usage, usage_of_day, usage_of_key

__all__ = [
    "Allowance",
    "ApiKey",
    "Usage",
    "asks_for_key",
    "change",
    "count",
    "create",
    "find",
    "free_places",
    "get",
    "hash_secret",
    "key_id_of",
    "list_keys",
    "mint",
    "note_used",
    "open_requests",
    "restore",
    "revoke",
    "settle",
    "spend",
    "usage_of_day",
    "usage_of_key",
    "version",
    "why_asked",
]
