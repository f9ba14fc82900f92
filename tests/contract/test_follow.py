"""Following and leaving a request; and what becomes of one that nobody follows."""

from __future__ import annotations

import pytest

from control import keys, requests
from control.constants import PLACES
from control.errors import RequestNotFound
from control.messages import decode_request
from control.redis.connection import run_steps
from control.requests import Emission
from tests.contract.conftest import MODEL, Farm, last, rids, token


def follow(farm: Farm, rid: str, api: str, have: int = 0) -> requests.Followed:
    return farm.run(requests.follow(MODEL, rid, api, "t", have))


def leave(farm: Farm, rid: str, api: str, delivered_ms: int | None = None) -> None:
    farm.run(requests.unfollow(MODEL, rid, api, delivered_ms))


def test_a_follower_gets_what_it_lacks(farm: Farm) -> None:
    """Follow returns the hash without the prompt, and the log after what the follower has."""
    lease = farm.lead()
    farm.put("a", view='{"endpoint": "chat"}')
    farm.claim(lease)
    farm.emit(lease, Emission("a", 1, [token(1, 40), token(2, 41), token(3, 42)]))
    followed = follow(farm, "a", "api2", have=1)
    assert [entry.token for entry in followed.entries] == [41, 42]
    assert followed.fields["view"] == '{"endpoint": "chat"}'
    assert "params" not in followed.fields
    assert not followed.ended
    assert farm.field("a", "followers") == "api2"


def test_a_follower_may_learn_what_was_enqueued(farm: Farm) -> None:
    """A follower that asks gets the params until the request ends, with the body's hash and the server's time."""
    lease = farm.lead()
    farm.put("a", idempotency_key="k", body_hash="h", deadline_ms=5000)
    farm.claim(lease)
    followed = farm.run(requests.follow(MODEL, "a", "api2", "t", 0, params=True))
    assert decode_request(followed.params).prompt == [0, 1, 2]
    assert "params" not in followed.fields
    assert (followed.fields["idempotency"], followed.fields["body_hash"]) == ("k", "h")
    assert 0 < int(followed.fields["deadline"]) - followed.server_ms <= 5000
    assert follow(farm, "a", "api2").params == ""
    farm.emit(lease, Emission("a", 1, [last(1)], "finished"))
    assert farm.run(requests.follow(MODEL, "a", "api2", "t", 0, params=True)).params == ""


def test_following_twice_is_following_once(farm: Farm) -> None:
    """A renewed registration adds nobody, and looking without an id neither."""
    farm.put("a", api="api1")
    follow(farm, "a", "api1")
    follow(farm, "a", "")
    assert farm.field("a", "followers") == "api1"


def test_another_tenant_learns_nothing(farm: Farm) -> None:
    """A stranger's follow and cancel are answered as if the request did not exist."""
    farm.put("a", tenant="t")
    for call in (requests.follow(MODEL, "a", "api", "stranger", 0), requests.cancel(MODEL, "a", "stranger")):
        with pytest.raises(RequestNotFound) as stranger:
            farm.run(call)
        with pytest.raises(RequestNotFound) as absent:
            farm.run(requests.follow(MODEL, "nothing", "api", "t", 0))
        assert str(stranger.value).replace("'a'", "'nothing'") == str(absent.value)
    assert farm.field("a", "followers") == ""
    assert farm.field("a", "state") == "queued"


def test_the_last_follower_leaving_cancels(farm: Farm) -> None:
    """By default the request is cancelled when nobody follows it any more, and not before."""
    farm.put("a", api="api1")
    follow(farm, "a", "api2")
    leave(farm, "a", "api1", delivered_ms=77)
    assert farm.field("a", "state") == "queued"
    leave(farm, "a", "api2")
    assert farm.field("a", "state") == "cancelled"
    assert farm.field("a", "t_delivered") == "77"
    assert farm.look("a").entries[0].finish == "cancelled"


def test_a_running_request_is_told_to_stop(farm: Farm) -> None:
    """The leader hears of it with its next step, and the bell wakes an idle one."""
    lease = farm.lead()
    farm.put("a", api="api1")
    bell = farm.claim(lease).bell
    leave(farm, "a", "api1")
    assert farm.client.xread({farm.keys.bell: bell})[0][1][0][1]["why"] == "cancel"
    assert farm.emit(lease, Emission("a", 1)).cancelled == ["a"]


def test_continue_goes_on_alone(farm: Farm) -> None:
    """With on_disconnect continue nothing happens, now or later."""
    farm.put("a", api="api1", on_disconnect="continue")
    leave(farm, "a", "api1")
    assert requests.reap_all(farm.client, MODEL) == []
    assert farm.field("a", "state") == "queued"
    assert farm.field("a", "orphan_at") is None


def test_seconds_wait_for_somebody_to_come_back(farm: Farm) -> None:
    """The request is ended once its time is over, and kept when somebody follows before."""
    for rid in ("a", "b"):
        farm.put(rid, api="api1", on_disconnect="60")
        leave(farm, rid, "api1")
    assert requests.reap_all(farm.client, MODEL) == []
    follow(farm, "b", "api2")
    for rid in farm.client.zrange(farm.keys.orphans, 0, -1):
        farm.client.zadd(farm.keys.orphans, {rid: 1})  # as if the sixty seconds were over
    assert requests.reap_all(farm.client, MODEL) == ["a"]
    assert [farm.field(rid, "state") for rid in ("a", "b")] == ["cancelled", "queued"]


def test_requests_of_a_dead_api_wait_for_their_grace(farm: Farm) -> None:
    """A request that only a dead API process followed becomes an orphan; one that another follows does not."""
    lease = farm.lead()
    farm.put("running", api="dead")
    farm.claim(lease)
    farm.put("queued", api="dead")
    farm.put("shared", api="dead")
    follow(farm, "shared", "alive")
    farm.put("kept", api="dead", on_disconnect="continue")
    assert requests.reap_all(farm.client, MODEL, ["dead"]) == []
    assert set(farm.client.zrange(farm.keys.orphans, 0, -1)) == {"running", "queued"}
    for rid in ("running", "queued"):
        farm.client.zadd(farm.keys.orphans, {rid: 1})
    assert set(requests.reap_all(farm.client, MODEL, ["dead"])) == {"running", "queued"}
    assert farm.field("queued", "state") == "cancelled"
    assert farm.emit(lease, Emission("running", 1)).cancelled == ["running"]
    assert [farm.field(rid, "state") for rid in ("shared", "kept")] == ["queued", "queued"]


def test_an_api_is_gone_when_its_heartbeat_has_lapsed(farm: Farm) -> None:
    """Of those ever seen, the ones without a heartbeat."""
    farm.client.sadd(keys.APIS, "one", "two")
    farm.client.hset(keys.api("two"), "url", "http://x")
    assert run_steps(farm.client, requests.gone_apis()) == ["one"]


def test_leaving_after_the_end_changes_nothing(farm: Farm) -> None:
    """A finished request stays finished when its follower goes."""
    lease = farm.lead()
    farm.put("a", api="api1")
    farm.claim(lease)
    farm.emit(lease, Emission("a", 1, [last(1)], "finished"))
    leave(farm, "a", "api1", delivered_ms=5)
    assert follow(farm, "a", "api1").ended
    assert farm.field("a", "state") == "finished"
    leave(farm, "nothing", "api1")


def test_a_log_is_read_from_where_the_reader_is(farm: Farm) -> None:
    """Reads of a log are bounded below by what the reader has, and empty where there is none."""
    lease = farm.lead()
    farm.put("a")
    farm.claim(lease)
    farm.emit(lease, Emission("a", 1, [token(1, 40), token(2, 41)]))
    assert [entry.token for entry in farm.run(requests.read_log(MODEL, "a", 1))] == [41]
    assert farm.run(requests.read_log(MODEL, "a", 2)) == []
    assert farm.run(requests.read_log(MODEL, "nothing", 0)) == []
    assert rids(farm.claim(lease)) == []


def test_places_of_those_that_only_wait(farm: Farm) -> None:
    """Each place is `position`'s; with the expected wait where the queue could tell it. A call writes nothing."""
    lease = farm.lead()
    farm.put("a", api="api1")
    farm.client.hset(farm.keys.load, mapping={"busy_ms": 60_000, "busy_ends": 9, "busy_since": 1})
    farm.put("b", api="api1")
    follow(farm, "b", "api2")
    [first, second] = farm.run(requests.places(MODEL, "api1", ["a", "b"]))
    assert first == requests.QueuePlace(1, None)
    assert second is not None and second.position == farm.run(requests.position(MODEL, "b")) == 2
    assert second.expected_wait_s is not None and 0 < second.expected_wait_s <= 6
    farm.claim(lease, 1)
    [first, second] = farm.run(requests.places(MODEL, "api2", ["a", "b"]))
    assert first is None and second is not None and second.position == 1


@pytest.mark.parametrize("why", ["claimed", "ended", "lost", "unfollowed", "begun", "another's name"])
def test_what_does_not_only_wait_has_no_place(farm: Farm, why: str) -> None:
    """Its follower has to read it: its state, its log, or that it is gone; or to follow it again."""
    lease = farm.lead()
    farm.put("a", api="api1")
    api = "api1"
    if why == "claimed":
        farm.claim(lease)
    elif why == "ended":
        farm.run(requests.cancel(MODEL, "a", "t"))
    elif why == "lost":
        farm.client.flushdb()
    elif why == "unfollowed":
        farm.client.hset(farm.keys.request("a"), "followers", "")
    elif why == "begun":
        farm.claim(lease)
        farm.emit(lease, Emission("a", 1, [token(1)]))
        farm.run(requests.requeue(lease, "a"))
        assert farm.field("a", "state") == "queued"
    else:
        api = "api"
    assert farm.run(requests.places(MODEL, api, ["a"])) == [None]


def test_places_are_read_in_bounded_calls(farm: Farm) -> None:
    """A caller with more requests makes several calls."""
    with pytest.raises(ValueError, match="of 1 to 256 requests"):
        requests.places(MODEL, "api1", ["a"] * (PLACES + 1))
