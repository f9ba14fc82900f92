"""Crash records name requests that may crash a group: a leader writes them before such a step, and another
inherits them."""

from __future__ import annotations

import pytest

from control import requests
from control.constants import SUSPECTS_MS, TRIAL_MS
from control.errors import ArgumentsRefused, Fenced, Lost
from control.messages import encode
from control.records import catalog
from control.redis.connection import Call
from control.replicas import health
from control.replicas.health import write_poison
from control.replicas.lease import Lease
from control.requests import Emission, Inheritance, takeover
from tests.contract.conftest import MODEL, Farm, last, rids, token
from worker.leader.crash_isolation import CrashRecord


def note(farm: Farm, lease: Lease, docket: str, suspects: list[str], cleared: list[str]) -> None:
    farm.run(requests.note_suspects(lease, docket, suspects, cleared))


def test_the_next_leader_reads_what_was_written(farm: Farm) -> None:
    """It outlives the lock and the epoch; suspects carry a mark, and those that are cleared lose it."""
    lease = farm.lead()
    for rid in ("a", "b"):
        farm.put(rid)
    farm.claim(lease)
    assert farm.run(requests.read_dockets(lease)) == {}
    call = requests.note_suspects(lease, '{"epoch":1}', ["a", "b"], [])
    farm.run(call)
    farm.run(call)
    note(farm, lease, '{"epoch":2}', ["b"], ["a"])
    assert (farm.field("a", "suspect"), farm.field("b", "suspect")) == (None, "1")
    farm.lose(lease)
    assert farm.run(requests.read_dockets(farm.lead(owner="two"))) == {"r0": '{"epoch":2}'}
    assert 0 < farm.client.pttl(farm.keys.docket) <= SUSPECTS_MS


def test_each_replica_has_a_docket_of_its_own(farm: Farm) -> None:
    """One that forgets its own leaves the other's; the last one takes the key with it."""
    first, second = farm.lead("r0"), farm.lead("r1")
    note(farm, first, '{"epoch":1}', [], [])
    note(farm, second, '{"epoch":2}', [], [])
    note(farm, first, "", [], [])
    assert farm.run(requests.read_dockets(first)) == {}
    assert farm.run(requests.read_dockets(second)) == {"r1": '{"epoch":2}'}
    note(farm, second, "", [], [])
    assert farm.client.exists(farm.keys.docket) == 0


def test_it_is_forgotten_when_nobody_is_watched(farm: Farm) -> None:
    """No key is left."""
    lease = farm.lead()
    farm.put("a")
    farm.claim(lease)
    note(farm, lease, "{}", ["a"], [])
    note(farm, lease, "", [], ["a"])
    assert farm.client.exists(farm.keys.docket) == 0 and farm.field("a", "suspect") is None


def test_a_request_that_is_gone_is_not_made_again(farm: Farm) -> None:
    """A mark on a request that outlived its retention would be a hash without an end."""
    lease = farm.lead()
    note(farm, lease, "{}", ["gone"], ["gone-too"])
    assert farm.client.exists(farm.keys.request("gone"), farm.keys.request("gone-too")) == 0


def test_a_stale_leader_writes_nothing(farm: Farm) -> None:
    """Lost or fenced, it neither overwrites the docket nor marks anybody."""
    old = farm.lead()
    farm.put("a")
    farm.claim(old)
    farm.lose(old)
    call = requests.note_suspects(old, '{"epoch":1}', ["a"], [])
    with pytest.raises(Lost):
        farm.run(call)
    new = farm.lead(owner="two")
    with pytest.raises(Fenced):
        farm.run(call)
    with pytest.raises(Fenced):
        farm.run(requests.inherit(old, "r1"))
    assert farm.run(requests.read_dockets(new)) == {} and farm.field("a", "suspect") is None


@pytest.mark.parametrize("count", ["-1", "x", "0.5", "3", ""])
def test_arguments_that_make_no_sense_change_nothing(farm: Farm, count: str) -> None:
    """They are looked at before the first write."""
    lease = farm.lead()
    farm.put("a")
    farm.claim(lease)
    named = (lease.keys.lock, lease.keys.epoch, farm.keys.docket, farm.keys.trial)
    with pytest.raises(ArgumentsRefused):
        farm.run(Call("suspect", named, (lease.token, farm.keys.base, "r0", "{}", count, "a"), list))
    assert farm.client.exists(farm.keys.docket) == 0 and farm.field("a", "suspect") is None


def test_suspicion_ends_with_the_request_or_its_stay(farm: Farm) -> None:
    """Neither a finished request nor one that another replica may claim is marked."""
    lease = farm.lead()
    for rid in ("a", "b"):
        farm.put(rid)
    farm.claim(lease)
    note(farm, lease, "{}", ["a", "b"], [])
    farm.emit(lease, Emission("a", 1, [last(1)], "finished"))
    farm.run(requests.requeue(lease, "b"))
    assert (farm.field("a", "suspect"), farm.field("b", "suspect")) == (None, None)


def test_the_history_of_poison_outlives_its_epoch(farm: Farm) -> None:
    """Newest first, with the first word of each epoch: so a leader learns how the one before it ended."""
    for kind in ("exited", "step_failed"):
        lease = farm.lead()
        write_poison(farm.client, MODEL, "r0", lease.epoch, 0, kind, "first word")
        write_poison(farm.client, MODEL, "r0", lease.epoch, 1, "later", "second word")
        farm.lose(lease)
    farm.lead()
    history = farm.run(health.poison_history(MODEL, "r0"))
    assert [(one.kind, one.message) for one in history] == [("step_failed", "first word"), ("exited", "first word")]
    assert history[0].epoch == lease.epoch > history[1].epoch


# --- another replica --------------------------------------------------------------------------------------------------


class Crashed:
    """Replica r0 ran a, b, c and d, and crashed; r1 leads. The docket of r0: a and b were in the step; b had got
    on; c is suspected.
    """

    def __init__(self, farm: Farm, poisoned: bool = True) -> None:
        self.farm, self.first = farm, farm.lead("r0")
        for rid in "abcd":
            farm.put(rid)
        farm.claim(self.first)
        farm.emit(self.first, Emission("b", 1, [token(1), token(2)]))
        docket = CrashRecord(epoch=self.first.epoch, tried={"a": 2, "b": 2}, rest=["c"])
        self.text = encode(docket).decode()
        note(farm, self.first, self.text, ["c"], [])
        if poisoned:
            write_poison(farm.client, MODEL, "r0", self.first.epoch, 0, "crashed", "killed by SIGSEGV")
        farm.lose(self.first)
        self.second = farm.lead("r1", owner="two")

    def give_up(self, replica: str = "r0") -> None:
        health.write_status(self.farm.client, MODEL, replica, "failed", "its folder is gone")

    def inherit(self, lease: Lease | None = None) -> Inheritance:
        return self.farm.run(requests.inherit(lease or self.second, "r0"))

    def taken(self, lease: Lease | None = None) -> list[str]:
        return sorted(rids(self.farm.run(takeover(lease or self.second, "r0"))))


@pytest.mark.parametrize("poisoned", [True, False])
def test_what_is_suspected_is_not_taken_over(farm: Farm, poisoned: bool) -> None:
    """Those of the step that crashed stay too, which no leader has judged yet; an end without poison adds none."""
    scene = Crashed(farm, poisoned)
    assert scene.inherit() == scene.inherit() == "stays"
    assert scene.taken() == (["b", "d"] if poisoned else ["a", "b", "d"])
    assert farm.field("c", "replica") == "r0"
    back = farm.lead("r0", owner="three")
    assert farm.run(requests.read_dockets(back)) == {"r0": scene.text}
    assert sorted(rids(farm.claim(back, adopt=True))) == (["a", "c"] if poisoned else ["c"])


def test_a_docket_without_suspects_holds_nothing_back(farm: Farm) -> None:
    """Each request of the step has made progress, or has ended meanwhile."""
    scene = Crashed(farm)
    for rid in "ac":
        farm.client.hset(farm.keys.request(rid), "state", "finished")
    assert scene.inherit() == "free" and farm.client.exists(farm.keys.trial) == 0


def test_a_request_that_is_another_replica_s_by_now_is_not_suspected(farm: Farm) -> None:
    """A docket that outlived its step, because the leader gave everything back, marks nobody."""
    scene = Crashed(farm)
    for rid in "ac":
        farm.client.hset(farm.keys.request(rid), "replica", "r2")
        farm.client.hdel(farm.keys.request(rid), "suspect")
    assert scene.inherit() == "free" and farm.field("c", "suspect") is None


@pytest.mark.parametrize("state", ["failed", "unplaceable"])
def test_the_suspects_of_a_replica_that_was_given_up_are_inherited(farm: Farm, state: str) -> None:
    """With its docket, at one stroke; the call may be repeated, and the docket lives on in the heir's next epoch."""
    scene = Crashed(farm)
    health.write_status(farm.client, MODEL, "r0", state, "gone")  # type: ignore[arg-type]
    assert scene.inherit() == scene.inherit() == "inherited"
    assert farm.client.get(farm.keys.trial) == "r1" and 0 < farm.client.pttl(farm.keys.trial) <= TRIAL_MS
    assert scene.taken() == ["a", "b", "c", "d"]
    farm.lose(scene.second)
    heir = farm.lead("r1", owner="four")
    assert farm.run(requests.read_dockets(heir)) == {"r0": scene.text}
    note(farm, heir, '{"epoch":9}', ["c"], [])
    assert farm.run(requests.read_dockets(heir)) == {"r1": '{"epoch":9}'} and farm.field("c", "suspect") == "1"
    assert farm.client.get(farm.keys.trial) == "r1", "the trial goes on"
    note(farm, heir, "", [], ["c"])
    assert farm.client.exists(farm.keys.trial, farm.keys.docket) == 0


def test_one_replica_at_a_time_tries_suspects(farm: Farm) -> None:
    """Another one takes what nobody suspects, and the rest once the right is free; a lapsed lease frees it."""
    scene = Crashed(farm)
    scene.give_up()
    third = farm.lead("r2", owner="three")
    farm.client.set(farm.keys.trial, "r2", px=TRIAL_MS)
    assert scene.inherit() == "waits" and scene.taken() == ["b", "d"]
    farm.client.delete(farm.keys.trial)
    assert scene.inherit(third) == "inherited" and scene.taken(third) == ["a", "c"]
    assert scene.inherit() == "free"


def test_nothing_is_inherited_from_a_replica_that_leads_again(farm: Farm) -> None:
    """Its status may be older than its lock."""
    scene = Crashed(farm)
    scene.give_up()
    farm.lead("r0", owner="three")
    assert scene.inherit() == "stays" and farm.client.exists(farm.keys.trial) == 0
    assert farm.run(requests.read_dockets(scene.second)) == {}


def test_after_a_flush_nobody_is_suspected(farm: Farm) -> None:
    """Redis lost the docket with everything else; what it was about comes back as new requests."""
    scene = Crashed(farm)
    farm.client.flushall()
    second = farm.lead("r1", owner="two")
    assert scene.inherit(second) == "free" and scene.taken(second) == []
    note(farm, second, '{"epoch":1}', ["a"], [])
    assert farm.client.exists(farm.keys.request("a")) == 0


def test_a_replica_that_was_given_up_keeps_no_request_for_its_weights(farm: Farm) -> None:
    """Its requests began with weights that nobody has now: they end with the reason, instead of waiting for ever."""
    first = farm.lead("r0", weights="old")
    farm.client.hset(farm.keys.weights, "r0", "old")
    farm.put("a")
    farm.claim(first)
    farm.emit(first, Emission("a", 1, [token(1)]))
    farm.lose(first)
    second = farm.lead("r1", owner="two", weights="new")
    assert farm.run(requests.inherit(second, "r0")) == "free" and rids(farm.run(takeover(second, "r0"))) == []
    assert farm.field("a", "state") == "running", "its own replica may come back to it"
    health.write_status(farm.client, MODEL, "r0", "failed", "its folder is gone")
    assert farm.run(requests.inherit(second, "r0")) == "free" and rids(farm.run(takeover(second, "r0"))) == []
    assert farm.field("a", "state") == "finished" and "weights were replaced" in (
        farm.look("a").entries[-1].cause or ""
    )


def test_a_replica_without_a_host_keeps_its_suspects_until_they_have_an_heir(farm: Farm) -> None:
    """Back in the queue they could crash every replica. Where no other replica leads they go back all the same."""
    scene = Crashed(farm)
    for name in ("r0", "r1"):
        farm.run(catalog.put_replica(MODEL, name, catalog.Assigned(revision=1, tp=1)))
    health.write_status(farm.client, MODEL, "r0", "unplaceable", "no host has room for it")
    assert catalog.retire(farm.client, MODEL, "r0") is None and farm.field("c", "state") == "running"
    assert scene.inherit() == "inherited" and scene.taken() == ["a", "b", "c", "d"]
    assert catalog.retire(farm.client, MODEL, "r0") is not None
    farm.lose(scene.second)
    assert catalog.retire(farm.client, MODEL, "r1") is not None
    assert farm.field("c", "state") == "queued" and farm.field("c", "suspect") is None
