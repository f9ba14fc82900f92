"""Whose prompts a request may begin with: the salt under which its prefixes are in the leader's cache.

A shared prefix shows in `cached_tokens` and in the time to the first token, so one tenant could test what another has
sent, token by token. Prefixes are therefore shared within a tenant, and beyond it only where the operator says so.
"""

from __future__ import annotations

from collections.abc import Collection

ALL = "all"
"""In place of tenants: all share with each other."""


def scoped_salt(owner: str, sharing: Collection[str], salt: str) -> str:
    """The salt of a request of `owner` that names the salt `salt` itself ("": none). `sharing`: the tenants that share
    with each other, or ALL. The first line names the scope: no client's salt reaches another scope."""
    scope = "shared" if ALL in sharing or owner in sharing else f"tenant {owner}"
    return f"{scope}\n{salt}"
