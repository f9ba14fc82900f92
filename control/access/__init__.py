"""API keys: their records, limits and usage."""

from __future__ import annotations

from control.access.limits import Allowance, free_places, open_requests, settle, spend
from control.access.record import ApiKey, hash_secret, key_id_of, mint
from control.access.settlements import Settlement, forget, metered_models, pending
from control.access.store import change, count, create, find, get, list_keys, note_used, restore, revoke, version
from control.access.usage import Usage, usage_of_day, usage_of_key
