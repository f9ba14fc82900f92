"""Requests of many choices end a few in a call; and the call says that there are more."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from control import requests
from control.constants import HAND_OUT
from control.redis.connection import Call
from control.replicas.lease import Lease
from control.requests import Adopted
from tests.contract.conftest import MODEL, Farm, token

CHOICES = 128
MOST_IN_A_CALL = 2 * CHOICES
RIDS = [f"wide-{index:02}" for index in range(HAND_OUT)]

Again = Callable[[], bool]
"""Makes one call; returns whether it says that there are more."""


def put_all(farm: Farm, **fields: Any) -> None:
    for rid in RIDS:
        farm.put(rid, n=CHOICES, **fields)


def claims_expired(farm: Farm) -> Again:
    put_all(farm, deadline_ms=1)
    lease = farm.lead()
    time.sleep(0.003)
    return lambda: farm.run(requests.claim(lease, 10_000, 10**9)).more


def claims_what_began_with_weights_that_are_gone(farm: Farm) -> Again:
    put_all(farm, delivered=[token(1)])
    for rid in RIDS:
        farm.client.hset(farm.keys.request(rid), "weights", "old")
    lease = farm.lead(weights="new")
    return lambda: farm.run(requests.claim(lease, 10_000, 10**9)).more


def _runs(farm: Farm) -> Lease:
    """All of them, and all are to be cancelled."""
    put_all(farm)
    lease = farm.lead()
    assert len(farm.claim(lease, 10_000, 10**9).requests) == HAND_OUT
    for rid in RIDS:
        assert farm.run(requests.cancel(MODEL, rid, "t")) == "running"
    return lease


def _in_batches(farm: Farm, call: Callable[[str], Call[Adopted]]) -> Again:
    after = [""]

    def once() -> bool:
        batch = farm.run(call(after[0]))
        assert not batch.requests
        after[0] = batch.after
        return batch.more

    return once


def adopts_cancelled(farm: Farm) -> Again:
    lease = _runs(farm)
    return _in_batches(farm, lambda after: requests.adopt(lease, after))


def takes_over_cancelled(farm: Farm) -> Again:
    dead = _runs(farm)
    farm.lose(dead)
    lease = farm.lead("r1", owner="two")
    return _in_batches(farm, lambda after: requests.takeover(lease, dead.replica, after))


def expires(farm: Farm) -> Again:
    put_all(farm, deadline_ms=1)
    time.sleep(0.003)
    return lambda: farm.run(requests.expire(MODEL))[1]


def reaps_what_a_gone_api_followed(farm: Farm) -> Again:
    put_all(farm, api="gone")
    return lambda: farm.run(requests.reap(MODEL, ["gone"], grace_ms=0)).more


def reaps_orphans(farm: Farm) -> Again:
    put_all(farm, api="left")
    for rid in RIDS:
        farm.run(requests.unfollow(MODEL, rid, "left", grace_ms=1))
    time.sleep(0.003)
    return lambda: farm.run(requests.reap(MODEL)).more


ACTS = (
    claims_expired,
    claims_what_began_with_weights_that_are_gone,
    adopts_cancelled,
    takes_over_cancelled,
    expires,
    reaps_what_a_gone_api_followed,
    reaps_orphans,
)


@pytest.mark.parametrize("act", ACTS)
def test_no_call_ends_many_requests_of_many_choices(farm: Farm, act: Callable[[Farm], Again]) -> None:
    """The calls say that there are more until all have ended, each a few requests."""
    again = act(farm)
    ended, more = [0], True
    while more:
        more = again()
        open_ = [rid for rid in RIDS if farm.field(rid, "state") in ("queued", "running")]
        ended.append(CHOICES * (HAND_OUT - len(open_)))
        assert ended[-1] > ended[-2] or not more, "a call that says more got on"
    assert ended[-1] == CHOICES * HAND_OUT
    assert max(late - early for early, late in itertools.pairwise(ended)) <= MOST_IN_A_CALL
    ends = [entry.choice for entry in farm.log(RIDS[-1]) if entry.finish is not None]
    assert ends == list(range(CHOICES))
    assert farm.load("queued") == 0
