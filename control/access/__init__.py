"""API keys: their records, limits, settlements and usage."""

from __future__ import annotations

from control.access.limits import (
    Allowance,
    Settlement,
    forget,
    free_places,
    metered_models,
    open_requests,
    pending,
    settle,
    spend,
)
from control.access.records import (
    ApiKey,
    change,
    count,
    create,
    find,
    get,
    hash_secret,
    key_id_of,
    list_keys,
    mint,
    note_used,
    restore,
    revoke,
    version,
)
from control.access.usage import Usage, usage_of_day, usage_of_key
