"""Tenants and classes are claimed in fair turns: who comes, who goes and comes back, and which class is next."""

from __future__ import annotations

from control import constants, requests
from control.requests import Emission
from tests.contract.conftest import MODEL, Farm, last, rids, token


def test_who_comes_when_nobody_waits_begins_at_the_turn_of_the_last(farm: Farm) -> None:
    """Service that a tenant got while no other waited does not count later."""
    lease = farm.lead()
    for index in range(5):
        farm.put(f"a{index}", tenant="a", prompt=100)
        farm.claim(lease)
    for rid, tenant in (("b1", "b"), ("a5", "a"), ("b2", "b"), ("b3", "b"), ("b4", "b")):
        farm.put(rid, tenant=tenant, prompt=60)
    assert rids(farm.claim(lease)) == ["b1", "b2", "a5", "b3", "b4"]


def test_a_debt_is_kept_while_a_tenant_is_away(farm: Farm) -> None:
    """Ending the last request and coming back at once forgives nothing."""
    lease = farm.lead()
    farm.put("a1", tenant="a", prompt=1)
    farm.put("b1", tenant="b", prompt=1)
    farm.claim(lease)
    farm.emit(lease, Emission("a1", 1, [*(token(seq) for seq in range(1, 30)), last(30)], "finished"))
    assert farm.client.zscore(farm.keys.debts("normal"), "a") == 31
    assert 0 < farm.client.pttl(farm.keys.debts("normal")) <= constants.DEBT_MS
    for rid, tenant in (("b2", "b"), ("a2", "a"), ("b3", "b"), ("b4", "b")):
        farm.put(rid, tenant=tenant, prompt=10)
    assert rids(farm.claim(lease)) == ["b2", "b3", "b4", "a2"]


def test_debts_below_the_turn_are_forgotten(farm: Farm) -> None:
    """They would change nothing, so they cost no memory."""
    lease = farm.lead()
    for index in range(3):
        farm.put(f"a{index}", tenant=f"tenant-{index}", prompt=5)
        farm.claim(lease)
        farm.emit(lease, Emission(f"a{index}", 1, [last(1)], "finished"))
    farm.put("b1", tenant="b", prompt=50)
    farm.put("b2", tenant="b", prompt=50)
    farm.claim(lease)
    farm.put("c", tenant="c")
    assert farm.client.zcard(farm.keys.debts("normal")) == 0


def test_nobody_is_passed_over_for_ever(farm: Farm) -> None:
    """A lower class gets every seventeenth claim while a higher one has a backlog."""
    for index in range(2 * constants.PASSED_OVER + 4):
        farm.put(f"n{index}", prompt=1)
    for rid in ("low1", "low2", "low3"):
        farm.put(rid, priority="low", prompt=1)
    order = rids(farm.claim(farm.lead()))
    assert [order.index(rid) for rid in ("low1", "low2")] == [constants.PASSED_OVER, 2 * constants.PASSED_OVER + 1]
    assert order[-1] == "low3"


def test_both_classes_behind_get_their_claims(farm: Farm) -> None:
    """The lowest is not starved by the middle one's share."""
    for index in range(60):
        farm.put(f"h{index}", prompt=1, priority="high")
    for index in range(4):
        farm.put(f"n{index}", prompt=1)
        farm.put(f"l{index}", prompt=1, priority="low")
    order = rids(farm.claim(farm.lead()))[:40]
    assert {rid for rid in order if rid[0] != "h"} >= {"n0", "n1", "l0", "l1"}


def test_a_tenant_with_nothing_left_to_claim_has_no_turn(farm: Farm) -> None:
    """A running request is charged but does not wait: the tenant's next request begins level with the others."""
    lease = farm.lead()
    farm.put("a1", tenant="a", prompt=1)
    farm.claim(lease)
    assert farm.client.zcard(farm.keys.turns("normal")) == 0
    assert farm.client.zscore(farm.keys.served("normal"), "a") == 1


def test_a_cancelled_backlog_leaves_the_counts_of_its_class(farm: Farm) -> None:
    """The waiting requests of each class are counted in and out, whichever way they go."""
    farm.put("a")
    farm.put("b")
    farm.put("c", priority="high")
    assert (farm.load("queued:normal"), farm.load("queued:high")) == (2, 1)
    farm.run(requests.cancel(MODEL, "a", "t"))
    lease = farm.lead()
    farm.claim(lease)
    assert (farm.load("queued:normal"), farm.load("queued:high")) == (0, 0)
    farm.run(requests.requeue(lease, "b"))
    assert farm.load("queued:normal") == 1
