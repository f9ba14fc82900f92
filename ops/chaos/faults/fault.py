"""The type of a fault, and the check that an outage costs no rank process and poisons no epoch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

from control.errors import RedisUnavailable
from ops.chaos.errors import Harm
from ops.chaos.system.target import Target

Fault: TypeAlias = Callable[[Target, random.Random], str]
"""Strikes, waits for the proof of its effect, cleans up, and returns the proof as a short sentence. Raises NoEffect
without a proof. The run, and not the fault, waits until the farm is whole."""

OUTAGES_S = (0.5, 3.0, 15.0)
"""Shorter and longer than the life of a lock and of a heartbeat, and far longer."""
WEIGHTS = (6, 3, 1)
NO_POISON = "none"


def outage_s(random: random.Random) -> float:
    """The length of a random outage."""
    return random.choices(OUTAGES_S, WEIGHTS)[0]


def harmless(fault: Callable[[Target, random.Random], str]) -> Fault:
    """`fault`, followed by a look at what it cost, where the farm was whole before.

    Raises Harm where a rank process is another one afterwards, or an epoch was poisoned.
    """

    def strike(target: Target, random: random.Random) -> str:
        before = _ranks_and_poison(target)
        proof = fault(target, random)
        if before is None:
            return proof
        target.wait_until_whole()
        after = _ranks_and_poison(target)
        # A server that has lost everything has no poison to tell of.
        if after is not None and (after[0] != before[0] or after[1] not in (before[1], NO_POISON)):
            raise Harm(f"{proof}; and it was not harmless: ranks and poison were {before}, are {after}")
        return f"{proof}; the same ranks, no poison"

    return strike


def _ranks_and_poison(target: Target) -> tuple[dict[int, int], str] | None:
    """The pid of each rank, and the newest poison in words; None while the farm is not whole."""
    try:
        if not target.whole():
            return None
        poisons = target.poisons()
    except RedisUnavailable:
        return None
    newest = f"{poisons[0].kind} in epoch {poisons[0].epoch}: {poisons[0].message}" if poisons else NO_POISON
    return target.rank_pids(), newest
