"""Stored responses: written once, completed once, looked after in turn."""

from __future__ import annotations

from control import keys
from control.responses import (
    StoredResponse,
    close_response,
    drop_response,
    due_responses,
    end_response,
    keep_response,
    read_response,
    refresh_response,
)
from tests.contract.conftest import Farm

STORED = StoredResponse(
    rid="r1", tenant="t", model="m", view='{"v":1}', chain=["r0"], input=[{"id": "i", "text": "é {x}"}]
)


def keep(farm: Farm, stored: StoredResponse = STORED, ttl_ms: int = 60_000) -> None:
    for call in keep_response(stored, ttl_ms):
        farm.run(call)


def make_due(farm: Farm, *rids: str) -> None:
    farm.client.zadd(keys.OPEN_RESPONSES, dict.fromkeys(rids, 1))


def test_what_is_kept_comes_back(farm: Farm) -> None:
    """A record is read as it was written, lives as long as it was told, and a repeat changes nothing."""
    assert farm.run(read_response("r1")) is None
    keep(farm)
    keep(farm, StoredResponse(rid="r1", tenant="thief", model="x", view="", chain=[], input=[]), 1)
    assert farm.run(read_response("r1")) == STORED
    assert 50_000 < farm.client.pttl(keys.response("r1")) <= 60_000


def test_the_first_end_stands(farm: Farm) -> None:
    """Two processes see the same end: both are told what is stored, and the life begins anew."""
    keep(farm, ttl_ms=1_000)
    assert farm.run(end_response("r1", b'{"a":1}', 60_000)) == b'{"a":1}'
    assert farm.run(end_response("r1", b'{"a":2}', 60_000)) == b'{"a":1}'
    found = farm.run(read_response("r1"))
    assert found is not None and found.response == b'{"a":1}'
    assert farm.client.pttl(keys.response("r1")) > 1_000


def test_what_was_deleted_stays_deleted(farm: Farm) -> None:
    """An end that comes after the deletion writes nothing."""
    keep(farm)
    for call in drop_response("r1"):
        farm.run(call)
    assert farm.run(end_response("r1", b"{}", 60_000)) is None
    assert farm.run(read_response("r1")) is None
    assert farm.client.zcard(keys.OPEN_RESPONSES) == 0


def test_what_is_due_goes_to_one(farm: Farm) -> None:
    """What is fresh is not due; what is due is handed out once, and again only after the next wait."""
    keep(farm)
    assert farm.run(due_responses()) == []
    make_due(farm, "r1", "r2", "r3")
    assert farm.run(due_responses(2)) == ["r1", "r2"]
    assert farm.run(due_responses()) == ["r3"]
    assert farm.run(due_responses()) == []
    make_due(farm, "r1")
    keep(farm)  # a repeat does not put it off
    farm.run(close_response("r3"))
    assert farm.run(due_responses()) == ["r1"]


def test_use_lengthens_a_life(farm: Farm) -> None:
    """What a later response builds upon lives as long as that one."""
    keep(farm, ttl_ms=1_000)
    farm.run(refresh_response("r1", 60_000))
    assert farm.client.pttl(keys.response("r1")) > 1_000
