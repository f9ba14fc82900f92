"""The state of a replica, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from control.replicas.health import Beat, Poison, Status
from control.replicas.model_overviews import STUCK_MS, ReplicaView, model_state, replica_state


def beat(epoch: int = 5, phase: str = "ready", pending_ms: int = 0, stalled_ms: int = 0) -> Beat:
    return Beat(
        epoch=epoch,
        seq=1,
        oldest_pending_ms=pending_ms,
        stalled_ms=stalled_ms,
        device="cpu",
        memory_bytes=1,
        phase=phase,
        pid=1,
        host="h",
    )


def view(**changes: Any) -> ReplicaView:
    healthy: dict[str, Any] = {
        "unload": False,
        "published": True,
        "served_before": True,
        "status": Status(state="running"),
        "epoch": 5,
        "locked": True,
        "poison": None,
        "beats": [beat(), beat()],
    }
    return ReplicaView(**{**healthy, **changes})


@pytest.mark.parametrize(
    ("changes", "state", "detail"),
    [
        ({}, "loaded", ""),
        ({"status": Status(state="failed", detail="out of memory")}, "failed", "out of memory"),
        ({"status": Status(state="unplaceable", detail="no host has room")}, "failed", "no host has room"),
        ({"poison": Poison(5, 1, "desync", "differs")}, "poisoned", "rank 1: desync: differs"),
        ({"poison": Poison(4, 1, "desync", "differs")}, "loaded", ""),
        ({"locked": False}, "recovering", "its leader is starting"),
        ({"locked": False, "served_before": False}, "loading", "its leader is starting"),
        ({"beats": [beat(), None]}, "recovering", "rank 1 is not there yet"),
        ({"beats": [beat(), beat(epoch=4)]}, "recovering", "rank 1 is not there yet"),
        ({"beats": [beat(phase="loading"), beat()]}, "recovering", "rank 0 is loading"),
        (
            {"beats": [beat(), beat(pending_ms=90_000, stalled_ms=STUCK_MS + 1)]},
            "recovering",
            "rank 1 has been at one command for 90 s, and got on last 30 s ago",
        ),
        ({"beats": [beat(), beat(pending_ms=90_000, stalled_ms=100)]}, "loaded", ""),
        ({"beats": [beat(pending_ms=90_000, stalled_ms=80_000), beat(pending_ms=90_000, stalled_ms=9)]}, "loaded", ""),
        ({"published": False, "served_before": False}, "loading", "the model's assets are not published yet"),
        ({"beats": [beat(phase="loading"), beat()], "served_before": False}, "loading", "rank 0 is loading"),
        ({"served_before": False}, "loaded", ""),
        ({"status": None, "locked": False, "served_before": False}, "loading", "no worker has it yet"),
        (
            {"status": Status(state="backoff", detail="rank 1 died"), "locked": False, "served_before": False},
            "loading",
            "rank 1 died",
        ),
        ({"unload": True}, "draining", ""),
        ({"unload": True, "locked": False}, "unloading", ""),
    ],
)
def test_a_state_follows_from_what_is_seen(changes: dict[str, Any], state: str, detail: str) -> None:
    """Loaded is only what beats, in this epoch, ready, and gets on."""
    assert replica_state(view(**changes)) == (state, detail)


def test_a_model_is_as_well_as_its_best_replica() -> None:
    """One that serves is enough; failed are only all together."""
    assert model_state([("failed", "a"), ("recovering", "b"), ("loaded", "")]) == ("loaded", "")
    assert model_state([("failed", "a"), ("loading", "b")]) == ("loading", "b")
    assert model_state([("failed", "a"), ("failed", "b")]) == ("failed", "a")
    assert model_state([]) == ("sleeping", "its next request loads it")
    assert model_state([("draining", "")], asleep=True)[0] == "sleeping"
    assert model_state([("draining", "")])[0] == "recovering"
