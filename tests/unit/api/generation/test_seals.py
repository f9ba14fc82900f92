"""Seals are bound to key, tenant and type: the farm's key, the type of the item, and the same each time."""

from __future__ import annotations

from typing import Any

import fakeredis
import pytest

from api.generation.seals import MAX_SEALED, Seals
from control import keys
from control.redis.connection import Batches


@pytest.fixture
def redis() -> Any:
    return fakeredis.FakeAsyncRedis(decode_responses=True)


def seals(redis: Any) -> Seals:
    """As of one process of the farm."""
    return Seals(Batches(redis))


async def test_any_process_opens_what_another_one_sealed(redis: Any) -> None:
    sealed = (await seals(redis).sealer("me"))("reasoning", "hm é")
    again = (await seals(redis).sealer("me"))("reasoning", "hm é")
    opened = await seals(redis).opener("me")
    assert sealed == again and "hm" not in sealed
    assert opened("reasoning", sealed) == "hm é"
    assert opened("reasoning", (await seals(redis).sealer("me"))("reasoning", "")) == ""


async def test_another_tenant_or_type_opens_nothing(redis: Any) -> None:
    sealed = (await seals(redis).sealer("me"))("reasoning", "hm")
    assert (await seals(redis).opener("you"))("reasoning", sealed) is None
    assert (await seals(redis).opener("me"))("compaction", sealed) is None


def changed(sealed: str) -> list[str]:
    other = "A" if sealed[9] != "A" else "B"
    return [sealed[:-1], sealed[:9] + other + sealed[10:], f"f2.{sealed[3:]}", "", "f1.é", sealed + "A" * MAX_SEALED]


async def test_what_was_changed_is_not_opened(redis: Any) -> None:
    sealed = (await seals(redis).sealer("me"))("reasoning", "some thoughts")
    opened = await seals(redis).opener("me")
    assert [opened("reasoning", text) for text in changed(sealed)] == [None] * 6


async def test_a_lost_key_makes_another_one(redis: Any) -> None:
    """A process that runs on uses the farm's new key, as every other process does."""
    one = seals(redis)
    old = (await one.sealer("me"))("reasoning", "hm")
    await redis.delete(keys.SEAL)
    new = (await one.sealer("me"))("reasoning", "hm")
    opened = await seals(redis).opener("me")
    assert opened("reasoning", old) is None and opened("reasoning", new) == "hm"
