"""A failover that lost the newest writes is repaired: what clients were given is written back, and stands.

The rollback itself is played with the server's own means: the keys of a request are dumped, and restored later.
"""

from __future__ import annotations

import pytest

from control import requests
from control.errors import LogConflict, RequestNotFound
from control.messages import LogEntry
from control.redis.connection import run_steps
from control.replicas.lease import Lease
from control.requests import Emission
from tests.contract.conftest import MODEL, Farm, last, rids, token


class Snapshot:
    """Everything of the model as it is now, to come back to."""

    def __init__(self, farm: Farm) -> None:
        self._farm = farm
        names = ["r0:running", "load", "turns:normal", "served:normal", "queue:normal:t", "req:a", "log:a"]
        self._keys = [f"{farm.keys.base}{name}" for name in names]
        self._hashes = {key: farm.client.hgetall(key) for key in self._keys if farm.client.type(key) == "hash"}
        self._log = farm.client.xrange(farm.keys.log("a"))

    def restore(self) -> None:
        """The request's hash and log only: the queue's entry is as it was while the request runs."""
        for key, fields in self._hashes.items():
            self._farm.client.delete(key)
            self._farm.client.hset(key, mapping=fields)
            self._farm.client.pexpire(key, 60_000)
        self._farm.client.delete(self._farm.keys.log("a"))
        for entry, fields in self._log:
            self._farm.client.xadd(self._farm.keys.log("a"), fields, id=entry)


def running(farm: Farm, n: int = 1) -> Lease:
    lease = farm.lead()
    farm.put("a", n=n, api="api1")
    farm.claim(lease)
    farm.emit(lease, Emission("a", 1, [token(1, 41)]))
    return lease


def repair(farm: Farm, *entries: LogEntry, api: str = "api1") -> str:
    return run_steps(farm.client, requests.repair(MODEL, "a", api, "t", entries))


def tokens(farm: Farm) -> list[int | None]:
    return [entry.token for entry in farm.look("a").entries]


def test_what_is_missing_is_appended_and_the_leader_goes_on_from_memory(farm: Farm) -> None:
    """The leader is told where the log is, sends what it has after that, and keeps the request."""
    lease = running(farm)
    before = Snapshot(farm)
    farm.emit(lease, Emission("a", 2, [token(2, 42), token(3, 43), token(4, 44)]))
    before.restore()
    assert repair(farm, token(1, 41), token(2, 42), token(3, 43)) == "appended"
    assert farm.emit(lease, Emission("a", 5, [token(5, 45)])).behind == {"a": 4}
    assert farm.emit(lease, Emission("a", 4, [token(4, 44), last(5, 45)], "finished")).behind == {}
    assert tokens(farm) == [41, 42, 43, 44, 45]
    assert farm.completion_tokens("a") == 5
    assert farm.load("queued") == 0


def test_a_leader_that_sent_it_again_first_loses_nothing(farm: Farm) -> None:
    """Repairing what needs no repair changes nothing, whoever was first and however often."""
    lease = running(farm)
    before = Snapshot(farm)
    farm.emit(lease, Emission("a", 2, [token(2, 42), token(3, 43)]))
    before.restore()
    farm.emit(lease, Emission("a", 2, [token(2, 42), token(3, 43), token(4, 44)]))
    assert repair(farm, token(1, 41), token(2, 42), token(3, 43)) == "same"
    assert repair(farm, token(1, 41), token(2, 42), api="api2") == "same"
    assert farm.emit(lease, Emission("a", 5, [token(5, 45)])).behind == {}
    assert tokens(farm) == [41, 42, 43, 44, 45]


def test_two_apis_repair_to_the_longer_one(farm: Farm) -> None:
    """In either order, and with the control in between that nothing is written twice."""
    lease = running(farm)
    before = Snapshot(farm)
    farm.emit(lease, Emission("a", 2, [token(2, 42), token(3, 43)]))
    before.restore()
    assert repair(farm, token(1, 41), token(2, 42), api="api2") == "appended"
    assert repair(farm, token(1, 41), token(2, 42), token(3, 43)) == "appended"
    assert repair(farm, token(1, 41), token(2, 42), api="api2") == "same"
    assert tokens(farm) == [41, 42, 43]


def test_what_a_client_was_given_replaces_another_continuation(farm: Farm) -> None:
    """A new epoch wrote something else before the repair came: it loses the request; what was given goes on."""
    lease = running(farm)
    before = Snapshot(farm)
    farm.emit(lease, Emission("a", 2, [token(2, 42), token(3, 43)]))
    before.restore()
    farm.emit(lease, Emission("a", 2, [token(2, 92)]))
    assert repair(farm, token(1, 41), token(2, 42), token(3, 43)) == "replaced"
    assert farm.emit(lease, Emission("a", 3, [token(3, 93)])).taken == ["a"]
    [claimed] = farm.claim(lease).requests
    assert [entry.token for entry in farm.log(claimed.rid)] == [41, 42, 43]
    farm.emit(lease, Emission("a", 4, [last(4, 44)], "finished"))
    assert tokens(farm) == [41, 42, 43, 44]
    assert farm.load("queued") == 0


def test_of_two_continuations_one_stands(farm: Farm) -> None:
    """Two processes never undo each other's repair for ever: the second one's clients get an error."""
    running(farm)
    assert repair(farm, token(1, 51)) == "replaced"
    with pytest.raises(LogConflict, match="api1"):
        repair(farm, token(1, 61), api="api2")
    assert tokens(farm) == [51]


def test_an_ended_request_that_runs_again_ends_again(farm: Farm) -> None:
    """Its whole answer was given: it ends with exactly that, and the leader that still runs it hears so."""
    lease = running(farm)
    before = Snapshot(farm)
    farm.emit(lease, Emission("a", 2, [token(2, 42)]))
    before.restore()
    assert repair(farm, token(1, 41), token(2, 42), last(3, 43)) == "appended"
    assert farm.field("a", "state") == "finished"
    assert tokens(farm) == [41, 42, 43]
    assert farm.emit(lease, Emission("a", 2, [token(2, 42)])).behind == {"a": 4}
    assert farm.claim(lease, adopt=True).requests == []
    assert farm.load("ended") == 1


def test_an_ended_request_of_which_nobody_has_the_end_is_adopted_again(farm: Farm) -> None:
    """The leader has forgotten it, the log is that of before: adopting hands it out where it was."""
    lease = running(farm)
    before, queue = Snapshot(farm), farm.keys.queue("normal", "t")
    [(entry, fields)] = farm.client.xrange(queue)
    farm.emit(lease, Emission("a", 2, [last(2, 42)], "finished"))
    before.restore()
    farm.client.xadd(queue, fields, id=entry)
    farm.client.xgroup_create(queue, "leaders", "0")
    farm.client.xreadgroup("leaders", lease.replica, {queue: ">"})
    farm.client.zadd(f"{farm.keys.base}served:normal", {"t": 1})
    farm.client.zadd(lease.keys.running, {f"a normal {entry} t": 0})
    [claimed] = farm.claim(lease, adopt=True).requests
    assert [entry.token for entry in farm.log(claimed.rid)] == [41]
    farm.emit(lease, Emission("a", 2, [last(2, 42)], "finished"))
    assert farm.look("a").ended
    assert tokens(farm) == [41, 42]


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_was_ended_from_outside_keeps_what_was_given(farm: Farm, n: int) -> None:
    """It was cancelled on the shorter log: every choice whose end was not given ends behind what was."""
    lease = running(farm, n)
    before = Snapshot(farm)
    farm.emit(lease, Emission("a", 2, [last(2, 42), token(3, 43, n - 1)] if n > 1 else [token(2, 42), token(3, 43)]))
    before.restore()
    farm.run(requests.requeue(lease, "a"))
    farm.run(requests.cancel(MODEL, "a", "t"))
    delivered = [token(1, 41), last(2, 42), token(3, 43, 1)] if n > 1 else [token(1, 41), token(2, 42), token(3, 43)]
    assert repair(farm, *delivered) == "replaced"
    entries = farm.look("a").entries
    assert entries[:3] == delivered
    assert [(entry.seq, entry.choice, entry.token, entry.finish) for entry in entries[3:]] == [
        (4, n - 1, None, "cancelled")
    ]
    assert farm.field("a", "state") == "cancelled"
    assert repair(farm, *entries) == "same"


def test_a_request_that_waits_again_is_claimed_with_what_was_given(farm: Farm) -> None:
    """The claim was lost too: the leader that runs it loses it, and the next claim continues."""
    lease = farm.lead()
    farm.put("a", api="api1")
    assert repair(farm, token(1, 41), token(2, 42)) == "appended"
    claims = farm.claim(lease)
    assert rids(claims) == ["a"]
    assert [entry.token for entry in farm.log("a")] == [41, 42]


def test_a_finished_request_that_was_brought_back_ends_without_a_leader(farm: Farm) -> None:
    """Its whole answer is the delivered prefix: nobody has to claim it."""
    delivered = [token(1, 41), last(2, 42)]
    farm.put("a", api="api1", delivered=delivered)
    assert repair(farm, *delivered) == "same"
    assert farm.field("a", "state") == "finished"
    assert farm.claim(farm.lead()).requests == []
    assert farm.load("queued") == 0


def test_a_stranger_repairs_nothing(farm: Farm) -> None:
    """Another tenant's request is answered as one that does not exist, and so is one that is gone."""
    running(farm)
    for rid, tenant in (("a", "other"), ("b", "t")):
        with pytest.raises(RequestNotFound):
            run_steps(farm.client, requests.repair(MODEL, rid, "api1", tenant, [token(1, 99)]))
    assert tokens(farm) == [41]
