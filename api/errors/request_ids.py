"""Ids of requests."""

from __future__ import annotations

import uuid

_MEMBERS = uuid.UUID("5f2a0d0e-2f0f-5c3e-9a1b-6b7c3d1e4f50")


def new_rid() -> str:
    return uuid.uuid4().hex


def member_rid(first: str, member: int) -> str:
    """Request id of prompt `member` of a list; derived, so that any process knows them all from the first."""
    return first if member == 0 else uuid.uuid5(_MEMBERS, f"{first}:{member}").hex
