"""Who may use the farm, how much of it, and how much they used: API keys, their limits, their usage."""

from __future__ import annotations

from control.access.limits import Allowance, open_requests, settle, spend
from control.access.record import ApiKey, hash_secret, key_id_of, mint
from control.access.store import change, create, find, get, list_keys, note_used, revoke, version
from control.access.usage import Usage, usage_of_day, usage_of_key

__all__ = [
    "Allowance",
    "ApiKey",
    "Usage",
    "change",
    "create",
    "find",
    "get",
    "hash_secret",
    "key_id_of",
    "list_keys",
    "mint",
    "note_used",
    "open_requests",
    "revoke",
    "settle",
    "spend",
    "usage_of_day",
    "usage_of_key",
    "version",
]
