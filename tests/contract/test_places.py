"""Admission counts sequences as places: what a claim takes of a leader's room, and whom it takes beyond that."""

from __future__ import annotations

from control import requests
from control.constants import CHOICE_TOKENS
from control.replicas.lease import Lease
from tests.contract.conftest import Farm, rids


def claim(
    farm: Farm, lease: Lease, room: int, guests: int = 0, sated: tuple[str, ...] = (), ahead: int = 10**9
) -> list[str]:
    return rids(farm.run(requests.claim(lease, room, 10**9, ahead, 0, guests, sated)))


def test_each_choice_takes_a_place(farm: Farm) -> None:
    """Two requests of 128 choices fill 256 places; a third is not taken."""
    lease = farm.lead()
    for rid in "abc":
        farm.put(rid, n=128)
    assert claim(farm, lease, 256) == ["a", "b"]
    assert claim(farm, lease, 0) == []


def test_a_request_with_more_choices_than_places_is_taken(farm: Farm) -> None:
    """Its choices run one after the other, and nothing is taken beside it."""
    lease = farm.lead()
    farm.put("a", n=100)
    farm.put("b")
    assert claim(farm, lease, 8) == ["a"]


def test_choices_that_have_ended_take_no_place(farm: Farm) -> None:
    """A request that another leader began is charged for what is left of it."""
    lease = farm.lead()
    farm.put("a", n=3)
    farm.put("b", n=2)
    claim(farm, lease, 3)
    farm.client.hset(farm.keys.request("a"), "ended", "0 2")
    farm.run(requests.requeue(lease, "a"))
    assert claim(farm, lease, 3) == ["b", "a"]


def test_choices_are_charged_to_the_turn(farm: Farm) -> None:
    """The prompt once, and so much of it for each further choice as is computed again at most."""
    lease = farm.lead()
    farm.put("a", tenant="t", prompt=1000, n=5)
    claim(farm, lease, 9)
    assert farm.client.zscore(farm.keys.served("normal"), "t") == 1000 + 4 * CHOICE_TOKENS
    farm.put("b", tenant="u", prompt=10, n=5)
    claim(farm, lease, 9)
    assert farm.client.zscore(farm.keys.served("normal"), "u") == 50 + 0


def test_guests_come_beyond_the_room(farm: Farm) -> None:
    """The leader is full with a hog: of every other flow one request is taken, in order, and none of the hog's."""
    lease = farm.lead()
    for rid in "abc":
        farm.put(rid, tenant="hog", n=128)
    assert claim(farm, lease, 256) == ["a", "b"]
    farm.put("x1", tenant="x", n=9)
    farm.put("x2", tenant="x")
    farm.put("low", tenant="x", priority="low")
    farm.put("high", tenant="hog", priority="high")
    assert claim(farm, lease, 0, 8, ("normal hog",)) == ["high", "x1", "low"]
    assert claim(farm, lease, 0, 8, ("normal hog", "normal x", "high hog", "low x")) == []
    assert claim(farm, lease, 0, 1, ("normal hog",)) == ["x2"]


def test_guests_are_no_more_than_asked_for(farm: Farm) -> None:
    """Ten tenants wait; three of them are taken, the others stay in the queue."""
    lease = farm.lead()
    for index in range(10):
        farm.put(f"r{index}", tenant=f"t{index}")
    assert claim(farm, lease, 0, 3) == ["r0", "r1", "r2"]


def test_guests_pass_a_head_that_does_not_fit(farm: Farm) -> None:
    """A sated flow's prompt waits for memory: nothing that needs room overtakes it, but guests are others' business."""
    lease = farm.lead()
    farm.put("big", tenant="hog", prompt=500)
    farm.put("small", tenant="x", prompt=5)
    farm.put("other", tenant="y", prompt=5)

    def taken(guests: int) -> list[str]:
        return rids(farm.run(requests.claim(lease, 9, 100, 10**9, 0, guests, ("normal hog",))))

    assert taken(0) == []
    assert taken(1) == ["small"]


def test_a_long_prefill_keeps_no_guest_waiting(farm: Farm) -> None:
    """Prompts for many steps are with the leader: only flows without any of them are taken."""
    lease = farm.lead()
    farm.put("a", tenant="hog")
    farm.put("x", tenant="x")
    assert claim(farm, lease, 9, 1, ("normal hog",), ahead=0) == ["x"]
