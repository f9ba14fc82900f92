"""The state of a replica and of a model, as a pure function of what Redis holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from control.replicas.health.beats import Beat
from control.replicas.health.poisoning import Poison
from control.replicas.health.status import Status

ReplicaState = Literal["loading", "loaded", "sleeping", "poisoned", "recovering", "failed", "draining", "unloading"]
"""A model on demand without a replica is `sleeping`; no replica is."""

ASLEEP = "its next request loads it"
"""The detail of a model that sleeps."""

NO_WORKER = "no worker has it yet"
NO_LEADER = "its leader is starting"
"""Details of a replica whose processes are not there yet."""

STUCK_MS = 30_000
"""Ranks of which none has got on in its command for this long are not healthy, however steadily they beat."""

_BEST_FIRST: tuple[ReplicaState, ...] = (
    "loaded",
    "recovering",
    "poisoned",
    "loading",
    "sleeping",
    "draining",
    "unloading",
    "failed",
)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """Everything that a replica's state follows from. `beats` are by rank."""

    unload: bool
    """The model's specification is a tombstone."""
    published: bool
    """The model's assets are there, without which no API process serves it."""
    served_before: bool
    """The replica published what its answers depend on, which it does before it claims its first request."""
    status: Status | None
    epoch: int
    locked: bool
    poison: Poison | None
    beats: Sequence[Beat | None]


def replica_state(view: ReplicaView) -> tuple[ReplicaState, str]:
    """The state and, where it is not simply loaded, why.

    Loaded means progress, not pulse: every rank beats in the current epoch, is ready, and none is stuck. Until it has
    served for the first time a replica is loading, also where a process of it died meanwhile; later it is recovering.
    """
    status = view.status
    if view.unload:
        return ("draining", "") if view.locked else ("unloading", "")
    if status is not None and status.state in ("failed", "unplaceable"):
        return "failed", status.detail
    if status is not None and status.state == "draining":
        return "draining", status.detail
    if view.poison is not None and view.poison.epoch == view.epoch:
        return "poisoned", f"rank {view.poison.rank}: {view.poison.kind}: {view.poison.message}"
    obstacle = _obstacle(view)
    if obstacle is None:
        return "loaded", ""
    detail = status.detail if status is not None and status.detail else obstacle
    return ("recovering" if view.served_before else "loading"), detail


def _obstacle(view: ReplicaView) -> str | None:
    """The reason for which the replica is not loaded, or None."""
    if view.status is None and not view.locked:
        return NO_WORKER
    if not view.locked:
        return NO_LEADER
    for rank, beat in enumerate(view.beats):
        if beat is None or beat.epoch != view.epoch:
            return f"rank {rank} is not there yet"
        if beat.phase != "ready":
            share = int(100 * beat.read_bytes / max(1, beat.weight_bytes))
            much = f": {share} %" if beat.phase == "loading" and share else ""
            return f"rank {rank} is {beat.phase}{much}"
    if (stuck := _stuck(view.beats)) is not None:
        return stuck
    return None if view.published else "the model's assets are not published yet"


def _stuck(beats: Sequence[Beat | None]) -> str | None:
    """The rank whose command is the oldest, where no rank that has a command gets on with it. A rank that waits in a
    collective for a slower one stands still, and is not stuck."""
    busy = [
        (beat.oldest_pending_ms, beat.stalled_ms, rank)
        for rank, beat in enumerate(beats)
        if beat and beat.oldest_pending_ms
    ]
    if not busy or min(stalled for _, stalled, _ in busy) <= STUCK_MS:
        return None
    pending, stalled, rank = max(busy)
    return f"rank {rank} has been at one command for {pending / 1000:.0f} s, and got on last {stalled / 1000:.0f} s ago"


def model_state(
    replicas: Sequence[tuple[ReplicaState, str]], unload: bool = False, asleep: bool = False
) -> tuple[ReplicaState, str]:
    """A model is as well as its best replica; `failed` needs all of them to be. `asleep`: no replica is wanted now.

    While its last replica goes to make room for the next one, requests wait: only an unload takes a model away.
    """
    if not replicas or (asleep and not unload and all(state != "loaded" for state, _ in replicas)):
        return ("unloading", "") if unload else ("sleeping", ASLEEP)
    state, detail = min(replicas, key=lambda replica: _BEST_FIRST.index(replica[0]))
    if state == "draining" and not unload:
        return "recovering", "it is being replaced"
    return state, detail


def loading_bytes(state: ReplicaState, status: Status | None, beats: Sequence[Beat]) -> tuple[int, int]:
    """Bytes that are done and all of them: of a download, else of the weights that all ranks read; (0, 0) in other
    states. `beats` are those of the epoch."""
    if state not in ("loading", "recovering"):
        return 0, 0
    if status is not None and status.state == "starting" and status.download_bytes:
        return status.downloaded_bytes, status.download_bytes
    if not any(beat.phase == "loading" for beat in beats):
        return 0, 0
    return sum(beat.read_bytes for beat in beats), sum(beat.weight_bytes for beat in beats)
