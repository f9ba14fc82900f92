"""Limits of an API key hold: requests and tokens per minute, requests at one time."""

from __future__ import annotations

import pytest

from control import access, scripts
from control.access import Allowance, ApiKey
from control.errors import RateLimited
from control.keys import KeyKeys
from tests.contract.conftest import MODEL, Farm


def key(**limits: int) -> ApiKey:
    return access.mint(**limits)[0]  # type: ignore[arg-type]


def spend(farm: Farm, one: ApiKey, rid: str, tokens: int = 10) -> Allowance:
    return farm.run(access.spend(one, rid, MODEL, {rid: tokens}))


def settle(farm: Farm, one: ApiKey, rid: str, tokens: int, **fields: bool) -> bool:
    """The limits are those of the key's record."""
    access.create(farm.client, one)
    return farm.run(access.settle(one.id, rid, rid, tokens, **fields))


def age(farm: Farm, one: ApiKey, ms: int) -> None:
    """As if the last change of the bucket lay so far back."""
    bucket = KeyKeys(one.id).bucket
    farm.client.hset(bucket, "at", int(farm.client.hget(bucket, "at")) - ms)


def test_requests_per_minute_refill_evenly(farm: Farm) -> None:
    """So many at once, then one more each time that its share of a minute has passed."""
    one = key(rpm=60)
    left = [spend(farm, one, f"r{i}").remaining_requests for i in range(60)]
    assert left[0] == 59 and left[-1] <= 5
    bucket = KeyKeys(one.id).bucket
    farm.client.hset(bucket, "requests", "0")
    with pytest.raises(RateLimited) as refused:
        spend(farm, one, "more")
    assert (refused.value.bound, refused.value.limit) == ("requests", 60)
    assert 0 < refused.value.retry_after <= 1
    age(farm, one, 1000)
    assert spend(farm, one, "more").remaining_requests == 0


def test_a_refusal_by_tokens_takes_none_and_tells_the_wait(farm: Farm) -> None:
    """A refused request takes nothing, and is told how long to wait for exactly what it needs."""
    one = key(tpm=6000)
    assert spend(farm, one, "a", tokens=5000).remaining_tokens == 1000
    with pytest.raises(RateLimited) as refused:
        spend(farm, one, "b", tokens=2000)
    assert refused.value.bound == "tokens"
    assert 8 < refused.value.retry_after <= 10
    assert isinstance(refused.value.allowance, Allowance) and refused.value.allowance.remaining_tokens >= 1000
    age(farm, one, 10_000)
    assert spend(farm, one, "b", tokens=2000).remaining_tokens < 200


def test_what_is_sent_twice_is_taken_once(farm: Farm) -> None:
    """The answer of the first call may have been lost."""
    one = key(rpm=5, tpm=1000)
    call = access.spend(one, "a", MODEL, {"a": 100})
    first, second = farm.run(call), farm.run(call)
    assert first.remaining_requests == second.remaining_requests == 4
    assert 900 <= second.remaining_tokens <= 910
    assert [settle(farm, one, "a", 600) for _ in range(2)] == [True, False]
    assert 300 <= spend(farm, one, "b", tokens=100).remaining_tokens < 400


def test_the_truth_replaces_the_estimate(farm: Farm) -> None:
    """Less gives back, no more than the limit; more leaves a debt that later requests wait for."""
    one = key(tpm=1000)
    spend(farm, one, "a", tokens=900)
    settle(farm, one, "a", 0)
    assert spend(farm, one, "b", tokens=500).remaining_tokens == 500
    settle(farm, one, "b", 3000)
    with pytest.raises(RateLimited) as refused:
        spend(farm, one, "c", tokens=0)
    assert 110 < refused.value.retry_after <= 120
    assert farm.client.pttl(KeyKeys(one.id).bucket) > 60_000


def test_requests_at_one_time(farm: Farm) -> None:
    """A place is free again once its request has ended, whatever it took; sent twice, it still is one place."""
    one = key(max_concurrent=2)
    for rid in ("a", "b", "b"):
        spend(farm, one, rid)
    with pytest.raises(RateLimited) as refused:
        spend(farm, one, "c")
    assert refused.value.bound == "concurrent"
    assert {rid: model for rid, (_, model) in farm.run(access.open_requests(one)).items()} == {"a": MODEL, "b": MODEL}
    settle(farm, one, "a", 5)
    spend(farm, one, "c")


def test_a_limit_that_is_none_counts_nothing(farm: Farm) -> None:
    """Only what is limited is taken and told, and what was used without a limit is no debt once there is one."""
    one = key(max_concurrent=9)
    rest = spend(farm, one, "a", tokens=10**9)
    assert (rest.limit_requests, rest.limit_tokens, rest.remaining_tokens) == (0, 0, 0)
    settle(farm, one, "a", 2 * 10**9)
    narrowed = access.change(farm.client, one, tpm=100)
    assert spend(farm, narrowed, "b", tokens=0).remaining_tokens <= 100


def test_a_full_bucket_is_forgotten(farm: Farm) -> None:
    """Nothing of a key that rests stays behind, and full is where it begins."""
    one = key(rpm=60)
    spend(farm, one, "a")
    assert 0 < farm.client.pttl(KeyKeys(one.id).bucket) <= 2000
    farm.client.delete(KeyKeys(one.id).bucket)
    assert spend(farm, one, "b").remaining_requests == 59


def test_without_its_memory_a_repeat_would_be_taken_twice(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with what a request took cut out of the script, a call whose answer was lost costs it twice."""
    check = "if redis.call('EXISTS', KEYS[2]) == 1 then"
    text = scripts.source("spend").replace(check, "if false then")
    assert check not in text
    monkeypatch.setitem(scripts.SCRIPTS, "spend", scripts.compose(text))
    one = key(rpm=5)
    call = access.spend(one, "a", MODEL, {"a": 100})
    assert [farm.run(call).remaining_requests for _ in range(2)] == [4, 3]
