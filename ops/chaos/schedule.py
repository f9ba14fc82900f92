"""The schedule of strikes: a function of the seed, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

EARLY = 0.25
"""Share of strikes that do not wait for the recovery from the strike before."""
EARLY_IN_A_ROW = 2
"""An agent gives a replica up that dies seven times without having been ready."""
EARLY_DELAY_S = 1.0
CALM_DELAY_S = 1.5


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault. `early`: `delay_s` after the proof of the last strike, during detection, rendezvous, load or prefill;
    else `delay_s` after all streams are under way."""

    kind: str
    early: bool
    delay_s: float
    seed: int
    """The seed of the fault's own random choices."""


def schedule(kinds: Sequence[str], times: int, seed: int) -> list[Strike]:
    """`times` strikes of each kind in a shuffled order."""
    draw = random.Random(seed)
    order = [kind for kind in kinds for _ in range(times)]
    draw.shuffle(order)
    strikes: list[Strike] = []
    in_a_row = EARLY_IN_A_ROW  # the first one finds the farm whole
    for kind in order:
        early = in_a_row < EARLY_IN_A_ROW and draw.random() < EARLY
        in_a_row = in_a_row + 1 if early else 0
        delay = draw.uniform(0, EARLY_DELAY_S if early else CALM_DELAY_S)
        strikes.append(Strike(kind, early, delay, draw.getrandbits(32)))
    return strikes
