"""Heartbeats, poison and status of ranks, and the state of a replica and of its model."""

from __future__ import annotations

from control.replicas.health.beats import BEAT_LIFE_S, Beat, beat, heartbeats, read_epoch, read_led_epoch
from control.replicas.health.end_reason import EndReason, end_reason, note_end
from control.replicas.health.epochs import Formation, formations, note_formation
from control.replicas.health.kv_use import kv_uses
from control.replicas.health.load import ModelLoad, load_of
from control.replicas.health.look import Look, look_at
from control.replicas.health.overview import (
    AssetsMark,
    Overview,
    ReplicaOverview,
    overview,
    overviews,
    reading_overviews,
)
from control.replicas.health.poisoning import (
    Fault,
    Poison,
    faults,
    poison,
    poison_history,
    read_poison,
    write_poison,
)
from control.replicas.health.shared import reading_shared, shared_overviews
from control.replicas.health.state import (
    NO_LEADER,
    NO_WORKER,
    STUCK_MS,
    ReplicaState,
    ReplicaView,
    model_state,
    replica_state,
)
from control.replicas.health.status import AgentState, Status, clear_status, status_of, write_status
