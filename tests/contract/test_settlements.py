"""A key's limits are settled at a request's end: from a record that the ending script leaves."""

from __future__ import annotations

import pytest

from control import access, scripts
from control.access import ApiKey
from control.constants import SETTLE_TOKENS
from control.errors import RateLimited
from control.keys import KeyKeys
from control.messages import LogEntry
from control.requests import Emission, cancel, expire
from tests.contract.conftest import MODEL, Farm


def begin(farm: Farm, one: ApiKey, *rids: str, tokens: int = 100) -> None:
    """As the API does it: the limits first, then the queue."""
    farm.run(access.spend(one, rids[0], MODEL, dict.fromkeys(rids, tokens)))
    for rid in rids:
        farm.put(rid, account=one.id, hold=rids[0])


def apply(farm: Farm) -> int:
    """Settle as an API process does; returns how many settlements changed anything."""
    settlements = farm.run(access.pending(MODEL))
    changed = sum([farm.run(settlement.apply()) for settlement in settlements])
    if settlements:
        farm.run(access.forget(MODEL, settlements))
    return changed


def left(farm: Farm, one: ApiKey) -> float:
    return float(farm.client.hget(KeyKeys(one.id).bucket, "tokens") or one.tpm)


def now(farm: Farm) -> float:
    seconds, microseconds = farm.client.time()
    return seconds + microseconds / 1e6


def has_left(farm: Farm, one: ApiKey, tokens: int, began: float) -> bool:
    """True if the bucket holds `tokens`, and no more than may have flowed in since `began`."""
    return tokens - 1 <= left(farm, one) <= tokens + 1 + one.tpm / 60 * (now(farm) - began)


def answer(farm: Farm, lease: object, rid: str, tokens: int, first: int = 1, done: bool = True) -> None:
    entries = [LogEntry(first + index, 0, 5) for index in range(tokens)]
    farm.emit(lease, Emission(rid, first, entries, done="finished" if done else None))  # type: ignore[arg-type]


@pytest.fixture
def limited(farm: Farm) -> ApiKey:
    one = access.mint(rpm=10, tpm=3000, max_concurrent=2)[0]
    access.create(farm.client, one)
    return one


def test_an_end_is_settled_without_its_api(farm: Farm, limited: ApiKey) -> None:
    """No process follows the request: its prompt and all its tokens count, and its place is free again."""
    began = now(farm)
    begin(farm, limited, "a")
    lease = farm.lead()
    farm.claim(lease)
    answer(farm, lease, "a", 40)
    assert apply(farm) == 1
    assert has_left(farm, limited, 3000 - 43, began)
    assert farm.run(access.open_requests(limited)) == {}


def test_a_settlement_that_is_applied_twice_counts_once(farm: Farm, limited: ApiKey) -> None:
    """Two processes read the same ones, and one of them dies before it has deleted them."""
    begin(farm, limited, "a")
    farm.run(cancel(MODEL, "a", "t"))
    settlements = farm.run(access.pending(MODEL))
    assert [(one.hold, one.rid, one.tokens, one.ended) for one in settlements] == [("a", "a", 0, True)]
    assert [farm.run(settlements[0].apply()) for _ in range(3)] == [True, False, False]
    assert left(farm, limited) == pytest.approx(3000, abs=1)
    farm.run(access.forget(MODEL, settlements))
    assert farm.run(access.pending(MODEL)) == []


def test_what_a_running_request_makes_beyond_its_estimate_counts_at_once(farm: Farm, limited: ApiKey) -> None:
    """Left alone with an estimate of 100 tokens it makes hundreds: the key is in debt before it has ended."""
    limited = access.change(farm.client, limited, tpm=600)
    begin(farm, limited, "a")
    lease = farm.lead()
    farm.claim(lease)
    for part in range(3):
        answer(farm, lease, "a", SETTLE_TOKENS, first=1 + part * SETTLE_TOKENS, done=False)
    apply(farm)
    assert left(farm, limited) < 0
    with pytest.raises(RateLimited):
        farm.run(access.spend(limited, "b", MODEL, {"b": 1}))
    assert farm.client.hget(KeyKeys(limited.id).spent("a"), "a") == str(3 + 3 * SETTLE_TOKENS)
    before = left(farm, limited)
    answer(farm, lease, "a", 1, first=1 + 3 * SETTLE_TOKENS)
    apply(farm)
    assert before - 1 <= left(farm, limited) < before + 500, "the end charges its last token, and the bucket fills"


def test_settlements_in_any_order_come_to_the_same(farm: Farm, limited: ApiKey) -> None:
    """An early one that comes after the end, or after a later one, changes nothing."""
    began = now(farm)
    begin(farm, limited, "a")
    early, late = (access.settle(limited.id, "a", "a", tokens, ended=False) for tokens in (300, 700))
    farm.run(late)
    farm.run(early)
    assert has_left(farm, limited, 2300, began)
    farm.run(access.settle(limited.id, "a", "a", 800))
    assert not farm.run(late)
    assert has_left(farm, limited, 2200, began)


def test_a_place_is_free_once_all_requests_of_its_hold_have_ended(farm: Farm, limited: ApiKey) -> None:
    """A call with three prompts is one of `max_concurrent`, until the last of them has ended."""
    begin(farm, limited, "a", "a1", "a2")
    for rid in ("a1", "a"):
        farm.run(cancel(MODEL, rid, "t"))
        apply(farm)
    assert set(farm.run(access.open_requests(limited))) == {"a"}
    farm.run(cancel(MODEL, "a2", "t"))
    apply(farm)
    assert farm.run(access.open_requests(limited)) == {}


def test_what_was_never_queued_counts_as_no_request(farm: Farm, limited: ApiKey) -> None:
    """A refusal gives the request back as well as its tokens."""
    farm.run(access.spend(limited, "a", MODEL, {"a": 100}))
    farm.run(access.settle(limited.id, "a", "a", 0, counts=False))
    assert farm.run(access.spend(limited, "b", MODEL, {"b": 100})).remaining_requests == 9


def test_every_way_to_end_leaves_a_settlement(farm: Farm, limited: ApiKey) -> None:
    """A request that expires in the queue, as one that is cancelled."""
    farm.run(access.spend(limited, "a", MODEL, {"a": 100}))
    farm.put("a", account=limited.id, hold="a", deadline_ms=1)
    farm.client.zadd(farm.keys.deadlines, {"a": 1})
    assert farm.run(expire(MODEL)) == (1, False)
    assert apply(farm) == 1


def test_requests_without_limits_leave_nothing(farm: Farm) -> None:
    """No API process would read the record."""
    farm.put("a", account="k")
    farm.run(cancel(MODEL, "a", "t"))
    assert not farm.client.exists(farm.keys.settlements)


def test_without_the_record_the_estimate_stands(farm: Farm, limited: ApiKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with the note cut out of the script the tokens of a stream that was left count for nothing."""
    text = scripts.SCRIPTS["emit"].text.replace("note_settlement(base, account, was", "tostring(base, account, was")
    assert text != scripts.SCRIPTS["emit"].text
    monkeypatch.setitem(scripts.SCRIPTS, "emit", scripts.compose(text))
    began = now(farm)
    begin(farm, limited, "a")
    lease = farm.lead()
    farm.claim(lease)
    answer(farm, lease, "a", 2000)
    assert apply(farm) == 0
    assert has_left(farm, limited, 2900, began)
