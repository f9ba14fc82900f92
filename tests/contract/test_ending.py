"""Requests are cancelled, expired, requeued and buried."""

from __future__ import annotations

import pytest

from control import requests
from control.errors import Fenced, Lost, RequestNotFound
from control.requests import Emission
from tests.contract.conftest import MODEL, Farm, rids, token


def cancel(farm: Farm, rid: str) -> str:
    return farm.run(requests.cancel(MODEL, rid, "t"))


def test_a_queued_request_is_cancelled_at_once(farm: Farm) -> None:
    """It leaves the queue with a final entry for every choice, and no leader gets it."""
    farm.put("a", n=2)
    with pytest.raises(RequestNotFound, match="No request 'b' in any model"):
        requests.cancel_any(farm.client, [MODEL], "chatcmpl-b")
    assert requests.cancel_any(farm.client, ["another", MODEL], "chatcmpl-a") == "cancelled"
    assert [(entry.seq, entry.choice, entry.finish) for entry in farm.look("a").entries] == [
        (1, 0, "cancelled"),
        (2, 1, "cancelled"),
    ]
    assert rids(farm.claim(farm.lead())) == []
    assert (farm.load("queued"), farm.load("queued_tokens")) == (0, 0)
    assert farm.client.exists(farm.keys.queue("normal", "t")) == 0


def test_a_running_request_is_cancelled_by_its_leader(farm: Farm) -> None:
    """Until the leader's next step it runs; cancelling again rings no second time."""
    lease = farm.lead()
    farm.put("a")
    farm.claim(lease)
    assert cancel(farm, "a") == "running"
    rung = farm.client.xlen(farm.keys.bell)
    assert cancel(farm, "a") == "running"
    assert farm.client.xlen(farm.keys.bell) == rung
    assert farm.emit(lease, Emission("a", 1, [token(1)])).cancelled == ["a"]


def test_cancelling_what_has_ended_changes_nothing(farm: Farm) -> None:
    """The end that came first stands."""
    farm.put("a")
    cancel(farm, "a")
    assert cancel(farm, "a") == "cancelled"
    assert len(farm.look("a").entries) == 1
    with pytest.raises(RequestNotFound):
        cancel(farm, "nothing")


def test_the_followers_hear_of_a_cancel(farm: Farm) -> None:
    """The final entries are published, so that no client waits for a leader."""
    farm.put("a", api="api1")
    with farm.client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(farm.keys.events("api1"))
        pubsub.get_message(timeout=20)
        cancel(farm, "a")
        message = pubsub.get_message(timeout=20)
    assert message is not None
    assert message["data"] == '[["a",[[1,0,null,"cancelled","cancelled"]]]]'


def test_a_cancel_between_others_keeps_their_order(farm: Farm) -> None:
    """A hole in a queue is stepped over."""
    for rid in ("a", "b", "c"):
        farm.put(rid)
    cancel(farm, "b")
    assert rids(farm.claim(farm.lead())) == ["a", "c"]


def test_a_waiting_request_expires_without_a_leader(farm: Farm) -> None:
    """Only after its deadline, and only while it waits."""
    farm.put("a")
    assert farm.run(requests.expire(MODEL)) == (0, False)
    farm.client.zadd(farm.keys.deadlines, {"a": 1})
    assert farm.run(requests.expire(MODEL)) == (1, False)
    assert farm.run(requests.expire(MODEL)) == (0, False)
    assert farm.field("a", "state") == "expired"
    assert [entry.finish for entry in farm.look("a").entries] == ["expired"]


def test_a_requeued_request_goes_on_elsewhere(farm: Farm) -> None:
    """Any replica may claim it, with its log, and nothing is lost or counted twice."""
    one, two = farm.lead("r0"), farm.lead("r1", owner="two")
    farm.put("a")
    farm.claim(one)
    farm.emit(one, Emission("a", 1, [token(1, 40)]))
    assert farm.run(requests.requeue(one, "a")) is True
    assert farm.run(requests.requeue(one, "a")) is True
    assert (farm.load("queued"), farm.load("queued_tokens")) == (1, 3)
    assert farm.run(requests.position(MODEL, "a")) == 1
    claimed = farm.claim(two).requests[0]
    assert [entry.token for entry in farm.log(claimed.rid)] == [40]
    assert claimed.attempts == 2
    assert farm.run(requests.requeue(one, "a")) is False
    assert farm.client.xlen(farm.keys.queue("normal", "t")) == 1


def test_a_dead_letter_keeps_what_is_needed_to_look_into_it(farm: Farm) -> None:
    """Burying ends the request for its client and keeps prompt, cause and place of death."""
    lease = farm.lead()
    farm.put("a")
    farm.claim(lease)
    farm.emit(lease, Emission("a", 1, [token(1)]))
    assert farm.run(requests.bury(lease, "a", 'crashed "alone"')) is True
    assert farm.run(requests.bury(lease, "a", 'crashed "alone"')) is True
    letters = farm.client.xrange(farm.keys.dead)
    assert len(letters) == 1
    fields = letters[0][1]
    assert (fields["rid"], fields["cause"], fields["replica"], fields["seq"]) == ("a", 'crashed "alone"', "r0", "1")
    assert '"prompt":[0,1,2]' in fields["params"]
    assert (fields["tenant"], fields["priority"], fields["prompt_tokens"], fields["attempts"]) == (
        "t",
        "normal",
        "3",
        "1",
    )
    final = farm.look("a").entries[-1]
    assert (final.seq, final.finish, final.cause) == (2, "error", 'crashed "alone"')
    assert farm.look("a").fields["state"] == "dead"


def test_only_the_owner_buries_and_requeues(farm: Farm) -> None:
    """A leader that has lost the lock, or the request, changes nothing."""
    old = farm.lead()
    farm.put("a")
    farm.claim(old)
    farm.lose(old)
    for call in (requests.bury(old, "a", "x"), requests.requeue(old, "a")):
        with pytest.raises(Lost):
            farm.run(call)
    new = farm.lead(owner="two")
    for call in (requests.bury(old, "a", "x"), requests.requeue(old, "a")):
        with pytest.raises(Fenced):
            farm.run(call)
    assert farm.run(requests.bury(new, "a", "x")) is False
    assert farm.field("a", "state") == "running"
