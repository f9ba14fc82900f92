"""A server that lost everything gets scripts, groups and keys again."""

from __future__ import annotations

import pytest

from control import requests
from control.errors import Lost
from control.placement.membership import beat_api, host_beat
from control.placement.placement import Host
from control.redis.connection import run_all
from control.replicas.lease import renew
from control.requests import Emission
from tests.contract.conftest import MODEL, Farm, last, rids, token


def test_scripts_are_sent_again(farm: Farm) -> None:
    """A server without the scripts gets them, within the same call and only where they lack."""
    lease = farm.lead()
    farm.put("a")
    farm.client.script_flush()
    farm.run(renew(lease, 1))
    claims, renewed = run_all(farm.client, [requests.claim(lease, 9, 99), renew(lease, 1)])
    assert rids(claims) == ["a"]
    assert renewed is False


def test_the_first_heartbeat_on_a_new_server_has_its_end(farm: Farm) -> None:
    """The end does not arrive before the heartbeat: an agent or API process that dies at once does not stay alive."""
    beats = {"host:h1": host_beat(Host("h1"), 7, 1), "api:a1": beat_api("a1", "http://a1", 1)}
    for key, calls in beats.items():
        farm.client.script_flush()
        run_all(farm.client, calls)
        assert farm.client.pttl(f"furrow:{key}") != -1


def test_a_group_that_is_gone_is_made_again(farm: Farm) -> None:
    """A queue that came back without its group is served from its beginning."""
    farm.put("a")
    farm.client.xgroup_destroy(farm.keys.queue("normal", "t"), "leaders")
    lease = farm.lead()
    assert rids(farm.claim(lease, adopt=True)) == ["a"]


def test_life_goes_on_after_a_total_loss(farm: Farm) -> None:
    """The leader is LOST, acquires again, and the re-enqueued request goes on after what was delivered."""
    old = farm.lead()
    farm.put("a", api="api1")
    farm.claim(old)
    farm.emit(old, Emission("a", 1, [token(1, 40), token(2, 41)]))
    farm.client.flushall()
    with pytest.raises(Lost):
        farm.emit(old, Emission("a", 3, [token(3, 42)]))
    farm.put("a", api="api1", delivered=[token(1, 40), token(2, 41)])
    new = farm.lead(floor=old.epoch)
    claimed = farm.claim(new, adopt=True).requests[0]
    assert [entry.token for entry in farm.log(claimed.rid)] == [40, 41]
    assert farm.emit(new, Emission("a", 3, [last(3, 42)], "finished")).behind == {}
    assert [entry.token for entry in farm.look("a").entries] == [40, 41, 42]


def test_calls_on_an_empty_server_answer_in_order(farm: Farm) -> None:
    """Nothing to read is an answer, not an error."""
    lease = farm.lead()
    assert farm.claim(lease, adopt=True).requests == []
    assert farm.claim(lease).bell == "0"
    assert farm.take_over(lease, "r9") == []
    assert requests.reap_all(farm.client, MODEL, ["gone"]) == []
    assert farm.run(requests.requeue(lease, "nothing")) is False
    assert farm.run(requests.bury(lease, "nothing", "x")) is False
    assert farm.emit(lease, Emission("nothing", 1, [token(1)])).taken == ["nothing"]
