"""Stored responses are written once and completed once: looked after in turn, and held to their owner's quota."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from control import keys
from control.constants import RESPONSE_OVERHEAD
from control.errors import ArgumentsRefused
from control.keys import ResponseKeys
from control.records.responses import (
    Quota,
    StoredResponse,
    Trimmed,
    ancestors,
    close_response,
    drop_response,
    due_chats,
    due_owners,
    due_responses,
    end_response,
    keep_response,
    list_chat,
    note_bytes,
    owners,
    read_response,
    trim_responses,
    use_responses,
    watch_response,
)
from tests.contract.conftest import Farm

STORED = StoredResponse(
    rid="r1", owner="o", tenant="t", model="m", view='{"v":1}', previous="r0", input=[{"id": "i", "text": "é {x}"}]
)
QUOTA = Quota(1_000_000, 1_000)
KEYS = ResponseKeys("o")


def keep(farm: Farm, stored: StoredResponse = STORED, ttl_ms: int = 60_000, quota: Quota = QUOTA) -> int:
    """Store and watch it; how many calls that took."""
    for call in watch_response(stored.rid, stored.owner):
        farm.run(call)
    calls = 1
    while not farm.run(keep_response(stored, ttl_ms, quota)):
        calls += 1
    return calls


def put(farm: Farm, rid: str, size: int = 0, owner: str = "o", quota: Quota = QUOTA, **fields: Any) -> int:
    return keep(farm, replace(STORED, rid=rid, owner=owner, input=[{"text": "x" * size}], **fields), quota=quota)


def stored_ids(farm: Farm, owner: str = "o") -> list[str]:
    """The rids of the records that are there, the least lately used first; index, sizes and records agree."""
    named = ResponseKeys(owner)
    rids = farm.client.zrange(named.index, 0, -1)
    sizes = farm.client.hgetall(named.sizes)
    assert set(sizes) - {"total"} == set(rids)
    assert int(sizes.get("total", 0)) == sum(int(sizes[rid]) for rid in rids)
    assert all(farm.client.exists(named.record(rid)) for rid in rids)
    return list(rids)


def make_due(farm: Farm, *members: str) -> None:
    farm.client.zadd(keys.OPEN_RESPONSES, dict.fromkeys(members, 1))


def test_what_is_kept_comes_back(farm: Farm) -> None:
    """A record is read as it was written, lives as long as it was told, and a repeat changes nothing."""
    assert farm.run(read_response("r1", "o")) is None
    keep(farm)
    keep(farm, replace(STORED, tenant="thief", view="", input=[]), 1)
    assert farm.run(read_response("r1", "o")) == STORED
    for key in (KEYS.record("r1"), KEYS.index, KEYS.sizes):
        assert 50_000 < farm.client.pttl(key) <= 60_000
    assert stored_ids(farm) == ["r1"]


def test_the_first_end_stands(farm: Farm) -> None:
    """Two processes see the same end: both are told what is stored, and the life begins anew."""
    keep(farm, ttl_ms=1_000)
    before = int(farm.client.hget(KEYS.sizes, "r1") or 0)
    assert farm.run(end_response("r1", "o", b'{"a":1}', 60_000, QUOTA)) == b'{"a":1}'
    assert farm.run(end_response("r1", "o", b'{"a":2}', 60_000, QUOTA)) == b'{"a":1}'
    record = farm.run(read_response("r1", "o"))
    assert record is not None and (record.response, record.view) == (b'{"a":1}', "")
    assert int(farm.client.hget(KEYS.sizes, "r1") or 0) == before + len(b'{"a":1}') - len(STORED.view)
    assert min(farm.client.pttl(key) for key in (KEYS.record("r1"), KEYS.index, KEYS.sizes)) > 1_000
    assert stored_ids(farm) == ["r1"]


def test_what_was_deleted_stays_deleted(farm: Farm) -> None:
    """An end that comes after the deletion writes nothing."""
    keep(farm)
    for call in drop_response("r1", "o"):
        farm.run(call)
    assert farm.run(end_response("r1", "o", b"{}", 60_000, QUOTA)) is None
    assert farm.run(read_response("r1", "o")) is None
    assert farm.client.zcard(keys.OPEN_RESPONSES) == 0
    assert stored_ids(farm) == []


def test_a_chat_leaves_the_list_with_its_record(farm: Farm) -> None:
    """Deleted, trimmed or removed to make room: the bound on the list counts records that are there alone."""
    for at in range(6):
        rid = f"c{at}"
        put(farm, rid, quota=Quota(1_000_000, 4), kind="chat")
        for call in list_chat(rid, "o", at, 60_000, 4):
            farm.run(call)
    assert farm.client.zrange(KEYS.chats, 0, -1) == ["c2", "c3", "c4", "c5"]
    for call in drop_response("c4", "o"):
        farm.run(call)
    assert farm.client.zrange(KEYS.chats, 0, -1) == ["c2", "c3", "c5"]
    farm.run(trim_responses("o", Quota(1_000_000, 1)))
    assert farm.client.zrange(KEYS.chats, 0, -1) == ["c5"]


def test_open_chats_are_not_among_open_responses(farm: Farm) -> None:
    """A process of a version that knows no chats is handed none."""
    for call in watch_response("c1", "o", "chat"):
        farm.run(call)
    assert farm.client.zrange(keys.OPEN_CHATS, 0, -1) == ["c1 o"]
    farm.client.zadd(keys.OPEN_CHATS, {"c1 o": 1})
    assert (farm.run(due_responses()), farm.run(due_chats())) == ([], [("c1", "o")])
    for call in close_response("c1", "o"):
        farm.run(call)
    assert not farm.client.exists(keys.OPEN_CHATS)


def test_what_is_due_goes_to_one(farm: Farm) -> None:
    """A fresh response is not due. A due one is handed out once, and again only after the next wait."""
    keep(farm)
    assert farm.run(due_responses()) == []
    make_due(farm, "r1 o", "r2 o", "r3 p")
    assert farm.run(due_responses(2)) == [("r1", "o"), ("r2", "o")]
    assert farm.run(due_responses()) == [("r3", "p")]
    assert farm.run(due_responses()) == []
    make_due(farm, "r1 o")
    keep(farm)  # a repeat does not put it off
    for call in close_response("r3", "p"):
        farm.run(call)
    assert farm.run(due_responses()) == [("r1", "o")]


def test_use_lengthens_a_life(farm: Farm) -> None:
    """A response that a later one builds upon lives as long as that one, and is not the oldest any more."""
    keep(farm, ttl_ms=1_000)
    put(farm, "r2")
    for call in use_responses(["r1", "gone"], "o", 70_000):
        farm.run(call)
    assert farm.client.pttl(KEYS.record("r1")) > 1_000
    assert min(farm.client.pttl(KEYS.index), farm.client.pttl(KEYS.sizes)) > 60_000
    assert stored_ids(farm) == ["r2", "r1"]


def test_a_chain_is_told_in_pages(farm: Farm) -> None:
    """Each response names the one before; a walk gives ids and sizes, and stops at one that is gone."""
    put(farm, "c0", previous="")
    for index in range(1, 70):
        put(farm, f"c{index}", size=index, previous=f"c{index - 1}")
    page = farm.run(ancestors("c69", "o"))
    assert page.rids == [f"c{index}" for index in range(69, 5, -1)] and page.next == "c5"
    assert page.sizes[0] - page.sizes[1] == 1
    rest = farm.run(ancestors(page.next, "o"))
    assert (rest.rids, rest.next) == (["c5", "c4", "c3", "c2", "c1", "c0"], "")
    farm.client.delete(KEYS.record("c3"))
    assert farm.run(ancestors("c5", "o")).rids == ["c5", "c4", "c3"]


def test_the_oldest_make_room(farm: Farm) -> None:
    """Beyond the number, and beyond the bytes, the least lately used go, and those of no other owner."""
    put(farm, "other", owner="p")
    for index in range(5):
        put(farm, f"r{index}", quota=Quota(1_000_000, 3))
    assert stored_ids(farm) == ["r2", "r3", "r4"]
    for call in use_responses(["r2"], "o", 70_000):
        farm.run(call)
    put(farm, "big", 5_000, quota=Quota(5_000 + 3 * RESPONSE_OVERHEAD, 1_000))
    assert stored_ids(farm) == ["big", "r2"]
    assert stored_ids(farm, "p") == ["other"]


def test_an_answer_counts_towards_the_quota(farm: Farm) -> None:
    """The oldest response makes room at an end. A response that is alone larger than the quota is not kept."""
    for rid in ("r1", "r2", "r3"):
        put(farm, rid)
    quota = Quota(9_500, 1_000)
    farm.run(end_response("r3", "o", b"x" * 8_000, 60_000, quota))
    assert stored_ids(farm) == ["r2", "r3"]
    answer = b"x" * 20_000
    put(farm, "r4")
    assert farm.run(end_response("r4", "o", answer, 60_000, quota)) == answer
    assert stored_ids(farm) == []


def test_thousands_of_small_ones_make_room_in_batches(farm: Farm) -> None:
    """One large response takes the place of thousands: no call drops more than a batch, and each makes progress."""
    many = 1_000
    for index in range(many):
        farm.run(keep_response(replace(STORED, rid=f"s{index}", input=[]), 60_000, Quota(10_000_000, 10_000)))
    total = int(farm.client.hget(KEYS.sizes, "total") or 0)
    calls = put(farm, "big", total - 2 * RESPONSE_OVERHEAD, quota=Quota(total, 10_000))
    assert calls == pytest.approx(many / 64, abs=1)
    assert stored_ids(farm)[-1] == "big" and len(stored_ids(farm)) <= 2


def test_a_trim_drops_what_has_lapsed(farm: Farm) -> None:
    """Records that Redis has expired are no longer counted; an owner with nothing left is not looked after any more."""
    for index in range(100):
        put(farm, f"r{index}")
    assert farm.run(owners()) == 1
    farm.client.zadd(KEYS.index, {f"r{index}": 1 for index in range(90)})
    farm.client.delete(*(KEYS.record("r0"), KEYS.record("r1")) if farm.url is None else [KEYS.record("r0")])
    first = farm.run(trim_responses("o", QUOTA))
    assert (first.done, first.number) == (False, 36)
    second = farm.run(trim_responses("o", QUOTA))
    assert (second.done, second.number) == (True, 10)
    for call in note_bytes("o", second):
        farm.run(call)
    assert (
        farm.client.zscore(keys.RESPONSE_BYTES, "o") == second.bytes == int(farm.client.hget(KEYS.sizes, "total") or 0)
    )
    while not (last := farm.run(trim_responses("o", Quota(0, 0)))).done:
        pass
    assert last == Trimmed(True, 0, 0)
    farm.client.zadd(keys.RESPONSE_OWNERS, {"o": 1})
    assert farm.run(due_owners()) == ["o"]
    for call in note_bytes("o", last):
        farm.run(call)
    assert farm.run(owners()) == 0 and farm.client.zcard(keys.RESPONSE_BYTES) == 0


def test_what_can_never_fit_is_refused_and_changes_nothing(farm: Farm) -> None:
    """A response larger than the whole quota pushes nothing out."""
    put(farm, "r1")
    with pytest.raises(ArgumentsRefused, match="bytes that its owner may keep"):
        put(farm, "huge", 2_000, quota=Quota(2_000, 10))
    assert stored_ids(farm) == ["r1"]
