"""Every failure detector of a farm, with its time-out and action. docs/reliability.md shows this table.

Only the standard library is imported: the supervisor loads this file too.
"""

from __future__ import annotations

from dataclasses import dataclass

from control.constants import HEARTBEAT_MS, LOCK_MS, RANK_BEAT_MS

# The supervisor: its agent.

AGENT_SILENT_S = 20.0
"""Time without a message of an agent that sent one before, until SIGKILL."""
AGENT_ABSENT_S = 60.0
"""Time without a working agent, until the host's ranks end. FURROW_AGENT_ABSENT sets another value."""

# The agent: its ranks.

RANK_SILENT_S = RANK_BEAT_MS / 1000
"""Life of a rank's heartbeat."""
STARVED_S = 6.0
"""Without a heartbeat of a rank whose threads run now and then or wait for a processor, until SIGKILL. A step that
spins has a deadline of its own."""
STOPPED_S = 2.0
"""In state T without a break, until SIGKILL, whatever the epoch. SIGCONT may come before."""
LATE_S = 10.0
"""Between the begin of an epoch and SIGKILL for a rank that was in an earlier one and does not join. A leader may pause
and wait for its lock before; a survivor joins within milliseconds."""
POISON_IGNORED_S = 6.0
"""Between the poison of an epoch and SIGKILL for a rank that still beats in it: its own side thread has failed."""

# A rank's side thread: its own process.

BEAT_S = 0.3
"""Between two heartbeats: a fifth of a heartbeat's life, so that four may be missed on a busy machine."""
OVER_STILL_S = 3.0
"""Between the end of an epoch, or the last progress after it, and the end of a process that has not left it."""
OVER_S = 8.0
"""Between the end of an epoch and the end of a process that makes progress and does not leave it."""

# A leader: its group, and the other replicas.

LOAD_STALL_S = 120.0
"""Without progress of a load, in weights that are read or memory that is filled: a slow disk may take hours."""
COLLECTIVE_S = 120.0
"""Limit of one collective on one host. All other detectors act long before."""
REPLICA_GONE_S = 5.0
"""Without the lock of another replica. A lock that lapsed is back well before this if its agent or its process can
renew it."""

# A rank's side thread: a step.

STEP_FLOOR_S = 2.0
"""Shortest deadline of a step."""
STEP_FACTOR = 10.0
"""A step that takes this many times the p99 of its kind is hung."""
UNKNOWN_STEP_S = 20.0
"""Deadline while there is no history: the first steps warm caches, allocators and kernels."""
PER_TOKEN_S = 0.05
"""Extra time for each prompt token in a step: a part of a layer may take as long."""


@dataclass(frozen=True, slots=True)
class Detector:
    """A way in which a fault is found."""

    fault: str
    found_by: str
    action: str
    after: str
    """Time-out, as the page shows it."""


def _s(*seconds: float) -> str:
    return " + ".join(f"{duration:g} s" for duration in seconds)


DETECTORS = (
    Detector(
        "a rank process ends",
        "supervisor: `waitpid`",
        "the agent poisons the epoch and starts the rank again",
        "milliseconds",
    ),
    Detector(
        "an agent ends",
        "supervisor: `waitpid`",
        "the next agent adopts the ranks",
        "milliseconds, then 0.5 s",
    ),
    Detector(
        "an agent hangs or is stopped",
        "supervisor: no message",
        "SIGKILL, and a new agent",
        _s(AGENT_SILENT_S),
    ),
    Detector(
        "a host stays without an agent",
        "supervisor: no message",
        "the ranks end in order",
        f"{_s(AGENT_ABSENT_S)} (`FURROW_AGENT_ABSENT`)",
    ),
    Detector(
        "a rank ends while there is no agent",
        "its group: a failed collective, or the step's deadline",
        "poison; the next agent reads the exit status",
        "as those",
    ),
    Detector(
        "a rank hangs in an epoch",
        "agent: no heartbeat, and no thread of it wants a processor",
        "poison, SIGKILL",
        f"{_s(RANK_SILENT_S)} after its last heartbeat, of which it sends one every {_s(BEAT_S)}",
    ),
    Detector(
        "… while its threads run or want a processor (busy machine, endless loop)",
        "agent: no heartbeat, or the step's deadline",
        "poison, SIGKILL",
        f"{_s(STARVED_S)} of silence, or the deadline",
    ),
    Detector(
        "a rank is stopped by a signal",
        "agent: process state",
        "poison, SIGKILL",
        _s(STOPPED_S),
    ),
    Detector(
        "a rank or leader that was in an epoch does not come to the next",
        "agent: its last heartbeat is of an earlier epoch",
        "poison, SIGKILL",
        _s(LATE_S),
    ),
    Detector(
        "a step hangs while all ranks beat",
        "the leader's side thread: no rank made progress",
        "poison; the agent kills the rank that has no heartbeat, if any",
        f"max({_s(STEP_FLOOR_S)}, {STEP_FACTOR:g} × p99) + {1000 * PER_TOKEN_S:g} ms per prompt token; "
        f"{_s(UNKNOWN_STEP_S)} instead of max(…) before 20 decode steps",
    ),
    Detector(
        "an external engine brings no token",
        "its leader: the time between tokens",
        "poison; the agent kills the engine and starts it again",
        "as a step",
    ),
    Detector(
        "an external engine is stopped, or uses no processor while it loads",
        "agent",
        "SIGKILL, and a new start",
        _s(STOPPED_S) + ", " + _s(LOAD_STALL_S),
    ),
    Detector(
        "a load stands still",
        "the leader's side thread: no rank read weights or filled memory",
        "poison",
        _s(LOAD_STALL_S),
    ),
    Detector(
        "a collective never ends, and no other detector acts",
        "each rank: its own clock",
        "the collective fails, which ends the epoch",
        _s(COLLECTIVE_S),
    ),
    Detector(
        "a rank does not leave an epoch that is over",
        "its side thread",
        "ends the process",
        f"{_s(OVER_STILL_S)} without progress, {_s(OVER_S)} in all",
    ),
    Detector(
        "… and the side thread hangs",
        "agent: a heartbeat in a poisoned epoch",
        "SIGKILL",
        _s(POISON_IGNORED_S),
    ),
    Detector(
        "a host is lost",
        "the placement holder: no heartbeat of the host",
        "it moves the host's replicas",
        _s(HEARTBEAT_MS / 1000),
    ),
    Detector(
        "a replica is lost, another one lives",
        "the other leader: the lock is absent",
        "it takes the requests over",
        _s(LOCK_MS / 1000, REPLICA_GONE_S),
    ),
)
