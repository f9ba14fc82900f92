"""A leader claims the right requests in order: for the room that it has."""

from __future__ import annotations

import pytest

from control import requests
from control.errors import Fenced, Lost, Poisoned
from control.messages import ModelSpec
from control.operations import desired
from control.records import catalog
from control.replicas.health import write_poison
from control.replicas.lease import release
from control.requests import Emission
from tests.contract.conftest import MODEL, Farm, last, rids, token


def test_classes_come_in_order(farm: Farm) -> None:
    """High before normal before low, whenever they came."""
    for rid, priority in (("a", "low"), ("b", "normal"), ("c", "high")):
        farm.put(rid, priority=priority)
    assert rids(farm.claim(farm.lead())) == ["c", "b", "a"]


def test_tenants_take_turns_by_what_they_were_served(farm: Farm) -> None:
    """A tenant with a long queue waits for one with a short queue; equal prompts alternate."""
    for rid in ("a1", "a2", "a3"):
        farm.put(rid, tenant="a", prompt=5)
    for rid in ("b1", "b2"):
        farm.put(rid, tenant="b", prompt=5)
    assert rids(farm.claim(farm.lead())) == ["a1", "b1", "a2", "b2", "a3"]


def test_generated_tokens_count_too(farm: Farm) -> None:
    """Of two tenants that wait, the one that is being served a long answer yields, as soon as a lot of it is told."""
    lease = farm.lead()
    for rid, tenant in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b"), ("b3", "b")):
        farm.put(rid, tenant=tenant)
    farm.claim(lease, requests_=2)
    farm.emit(lease, Emission("a1", 1, [token(seq) for seq in range(1, 17)]))
    assert rids(farm.claim(lease)) == ["b2", "b3", "a2"]


def test_an_idle_past_earns_no_monopoly(farm: Farm) -> None:
    """A tenant that comes late starts level with the lowest one that waits."""
    lease = farm.lead()
    farm.put("a0", tenant="a", prompt=90)
    farm.claim(lease)
    for rid in ("a1", "a2", "a3"):
        farm.put(rid, tenant="a", prompt=10)
    for rid in ("b1", "b2", "b3"):
        farm.put(rid, tenant="b", prompt=10)
    assert rids(farm.claim(lease))[:4] == ["a1", "b1", "a2", "b2"]


def test_a_claim_stops_where_the_head_does_not_fit(farm: Farm) -> None:
    """Nothing small overtakes the head that waits for room, in its class or below."""
    farm.put("big", tenant="a", prompt=50)
    farm.put("small", tenant="b", prompt=1, priority="low")
    lease = farm.lead()
    assert rids(farm.claim(lease, tokens=49)) == []
    assert rids(farm.claim(lease, tokens=51)) == ["big", "small"]


def test_a_paused_model_hands_out_nothing(farm: Farm) -> None:
    """Requests wait in the queue until it is resumed, which rings the bell; a claim that was answered is repeated."""
    spec = ModelSpec(name=MODEL, source="/x")
    catalog.put_spec(farm.client, spec)
    lease = farm.lead()
    farm.put("a")
    before = requests.claim(lease, 10, 1000)
    assert rids(farm.run(before)) == ["a"]
    assert desired.pause(farm.client, MODEL, paused=True)
    assert not desired.pause(farm.client, MODEL, paused=True)
    farm.put("b")
    assert rids(farm.run(before)) == ["a"]
    held = farm.claim(lease)
    assert (rids(held), held.more) == ([], False)
    assert desired.pause(farm.client, MODEL, paused=False)
    resumed = farm.claim(lease)
    assert rids(resumed) == ["b"] and resumed.bell != held.bell
    stored = catalog.get_spec(farm.client, MODEL)
    assert stored == spec


def test_room_for_requests_and_tokens_is_kept(farm: Farm) -> None:
    """A claim takes no more than it was told."""
    for rid in ("a", "b", "c"):
        farm.put(rid, prompt=10)
    lease = farm.lead()
    assert rids(farm.claim(lease, requests_=1)) == ["a"]
    assert rids(farm.claim(lease, tokens=19)) == ["b"]
    assert rids(farm.claim(lease, requests_=0)) == []


def test_the_same_claim_again_hands_out_the_same(farm: Farm) -> None:
    """When the answer was lost the repeat returns the requests, and takes no new ones."""
    farm.put("a")
    lease = farm.lead()
    call = requests.claim(lease, 10, 1000)
    assert rids(farm.run(call)) == ["a"]
    farm.put("b")
    repeat = farm.run(call)
    assert rids(repeat) == ["a"]
    assert repeat.requests[0].attempts == 1
    assert rids(farm.claim(lease)) == ["b"]


def test_a_new_epoch_adopts_what_the_old_one_had(farm: Farm) -> None:
    """The next leader of the replica gets every request that had not ended, with its log and one attempt more."""
    old = farm.lead()
    for rid in ("a", "b", "c"):
        farm.put(rid)
    farm.claim(old)
    farm.emit(old, Emission("a", 1, [token(1, 40), token(2, 41)]), Emission("b", 1, [last(1)], "finished"))
    farm.lose(old)
    new = farm.lead(owner="two")
    adopted = farm.claim(new, requests_=0, tokens=0, adopt=True)
    assert rids(adopted) == ["a", "c"]
    assert [entry.token for entry in farm.log("a")] == [40, 41]
    assert [claimed.attempts for claimed in adopted.requests] == [2, 2]
    assert farm.emit(new, Emission("a", 3, [token(3)])).behind == {}


def test_adopting_twice_in_an_epoch_is_one_attempt(farm: Farm) -> None:
    """A leader that lost an answer may adopt again: it gets all of it, and nobody is blamed."""
    lease = farm.lead()
    farm.put("a")
    farm.claim(lease)
    again = farm.claim(lease, adopt=True)
    assert rids(again) == ["a"]
    assert again.requests[0].attempts == 1


def test_adoption_leaves_other_replicas_alone(farm: Farm) -> None:
    """A replica does not claim a request that another one runs."""
    one, two = farm.lead("r0"), farm.lead("r1")
    farm.put("a")
    farm.claim(one)
    assert rids(farm.claim(two, adopt=True)) == []


def test_a_request_cancelled_meanwhile_ends_at_adoption(farm: Farm) -> None:
    """The script ends a cancelled request that no leader runs."""
    old = farm.lead()
    farm.put("a", n=2)
    farm.claim(old)
    farm.emit(old, Emission("a", 1, [last(1, choice=0)]))
    farm.run(requests.cancel(MODEL, "a", "t"))
    farm.lose(old)
    assert rids(farm.claim(farm.lead(owner="two"), adopt=True)) == []
    entries = farm.look("a").entries
    assert [(entry.choice, entry.finish) for entry in entries] == [(0, "stop"), (1, "cancelled")]


def test_a_deadline_passed_in_the_queue_ends_the_request(farm: Farm) -> None:
    """The claim writes the end and goes on with the next."""
    farm.put("a", n=2)
    farm.put("b")
    farm.client.hset(farm.keys.request("a"), "deadline", 1)
    assert rids(farm.claim(farm.lead())) == ["b"]
    followed = farm.look("a")
    assert followed.fields["state"] == "expired"
    assert [(entry.choice, entry.finish) for entry in followed.entries] == [(0, "expired"), (1, "expired")]
    assert farm.load("queued") == 0


def test_an_entry_whose_request_is_gone_is_dropped(farm: Farm) -> None:
    """A request that outlived its retention leaves no trace in the queue."""
    farm.put("a")
    farm.client.delete(farm.keys.request("a"))
    assert rids(farm.claim(farm.lead())) == []
    assert farm.client.exists(farm.keys.queue("normal", "t"), farm.keys.turns("normal")) == 0
    assert farm.load("queued") == 0


def test_a_stale_leader_claims_nothing(farm: Farm) -> None:
    """Lost, fenced and poisoned leaders are refused, and the request stays in the queue."""
    farm.put("a")
    lease = farm.lead()
    write_poison(farm.client, MODEL, "r0", lease.epoch, 0, "kind", "why")
    with pytest.raises(Poisoned):
        farm.claim(lease)
    farm.lose(lease)
    with pytest.raises(Lost):
        farm.claim(lease)
    other = farm.lead(owner="two")
    with pytest.raises(Fenced):
        farm.claim(lease)
    assert rids(farm.claim(other)) == ["a"]


def test_takeover_needs_the_lock_to_be_absent(farm: Farm) -> None:
    """A living replica keeps its requests; a dead one's go over, with their log, and it wakes up fenced."""
    one, two = farm.lead("r0"), farm.lead("r1", owner="two")
    farm.put("a")
    farm.claim(one)
    farm.emit(one, Emission("a", 1, [token(1, 40)]))
    assert [one.rid for one in farm.take_over(two, "r0")] == []
    farm.lose(one)
    call = requests.takeover(two, "r0")
    taken = farm.run(call)
    assert [entry.token for entry in farm.log("a")] == [40]
    assert taken.requests == farm.run(call).requests
    with pytest.raises(Fenced):
        farm.emit(one, Emission("a", 2, [token(2)]))
    assert farm.emit(two, Emission("a", 2, [last(2)], "finished")).behind == {}
    assert farm.client.exists(farm.keys.queue("normal", "t")) == 0


def test_a_takeover_of_nothing_disturbs_nobody(farm: Farm) -> None:
    """A replica that is late and left nothing keeps its epoch: its ranks may be waiting for its leader."""
    one, two = farm.lead("r0"), farm.lead("r1", owner="two")
    farm.lose(one)
    assert [one.rid for one in farm.take_over(two, "r0")] == []
    assert farm.client.get(one.keys.epoch) == str(one.epoch)
    with pytest.raises(Lost):
        farm.claim(one)


def test_a_released_lock_is_no_reason_to_lose_requests(farm: Farm) -> None:
    """After an orderly end the replica's next leader adopts."""
    one = farm.lead()
    farm.put("a")
    farm.claim(one)
    farm.run(release(one))
    assert rids(farm.claim(farm.lead(owner="two"), adopt=True)) == ["a"]


def test_no_more_is_taken_than_will_soon_be_prefilled(farm: Farm) -> None:
    """The request that reaches the bound is still taken, however long; those behind it stay in the queue."""
    lease = farm.lead()
    for rid in ("a", "b", "c"):
        farm.put(rid, prompt=10)
    assert farm.run(requests.claim(lease, 9, 10_000, ahead_tokens=0)).requests == []
    taken = farm.run(requests.claim(lease, 9, 10_000, ahead_tokens=11))
    assert [claimed.rid for claimed in taken.requests] == ["a", "b"]
    assert farm.field("c", "state") == "queued"
