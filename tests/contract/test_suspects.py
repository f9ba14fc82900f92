"""What a leader writes down before a step that may crash its group."""

from __future__ import annotations

import pytest

from control import health, requests
from control.errors import Fenced, Lost
from control.health import write_poison
from control.requests import Emission
from tests.contract.conftest import MODEL, Farm, last


def test_the_next_leader_reads_what_was_written(farm: Farm) -> None:
    """It outlives the lock and the epoch; suspects carry a mark, and those that are cleared lose it."""
    lease = farm.lead()
    for rid in ("a", "b"):
        farm.put(rid)
    farm.claim(lease)
    assert farm.run(requests.read_suspects(lease)) == ""
    call = requests.note_suspects(lease, '{"epoch":1}', ["a", "b"], [])
    farm.run(call)
    farm.run(call)
    farm.run(requests.note_suspects(lease, '{"epoch":2}', ["b"], ["a"]))
    assert (farm.field("a", "suspect"), farm.field("b", "suspect")) == (None, "1")
    farm.lose(lease)
    assert farm.run(requests.read_suspects(farm.lead(owner="two"))) == '{"epoch":2}'
    assert farm.client.pttl(lease.keys.suspects) > 0


def test_it_is_forgotten_when_nobody_is_watched(farm: Farm) -> None:
    """No key is left."""
    lease = farm.lead()
    farm.put("a")
    farm.claim(lease)
    farm.run(requests.note_suspects(lease, "{}", ["a"], []))
    farm.run(requests.note_suspects(lease, "", [], ["a"]))
    assert farm.client.exists(lease.keys.suspects) == 0 and farm.field("a", "suspect") is None


def test_a_request_that_is_gone_is_not_made_again(farm: Farm) -> None:
    """A mark on a request that outlived its retention would be a hash without an end."""
    lease = farm.lead()
    farm.run(requests.note_suspects(lease, "{}", ["gone"], ["gone-too"]))
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
    assert farm.run(requests.read_suspects(new)) == "" and farm.field("a", "suspect") is None


def test_suspicion_ends_with_the_request_or_its_stay(farm: Farm) -> None:
    """Neither a finished request nor one that another replica may claim is marked."""
    lease = farm.lead()
    for rid in ("a", "b"):
        farm.put(rid)
    farm.claim(lease)
    farm.run(requests.note_suspects(lease, "{}", ["a", "b"], []))
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
