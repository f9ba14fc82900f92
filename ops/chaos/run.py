"""A run: a schedule that is a function of the seed, so that it can be repeated, and its strikes under load, each with
its proof."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ops.chaos.errors import Harm, NoEffect
from ops.chaos.faults import FAULTS, ON_ANY_FARM
from ops.chaos.load import Load
from ops.chaos.system.target import Target
from ops.chaos.system.view import View

EARLY = 0.25
"""Share of strikes that do not wait for the recovery from the strike before."""
EARLY_IN_A_ROW = 2
"""An agent gives a replica up that dies seven times without having been ready."""
EARLY_DELAY_S = 1.0
CALM_DELAY_S = 1.5
UNDER_WAY = 0.75
"""Share of the streams that must have had an event since the farm was whole before a calm strike."""
UNDER_WAY_WITHIN_S = 180.0


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


@dataclass(frozen=True, slots=True)
class Struck:
    """A strike that was made, from its signal to its proof, by the monotonic clock."""

    strike: Strike
    began: float
    ended: float
    streams: int
    """Under way when it struck."""
    proof: str | None
    """None without a proved effect, or if the harm was too large; `detail` has the reason."""
    detail: str = ""


def strike_all(
    target: View,
    load: Load,
    strikes: Sequence[Strike],
    streams: int,
    done: list[Struck],
    say: Callable[[str], None],
) -> None:
    """Make all strikes and append each to `done`. Raises ChaosError if the farm does not recover from one."""
    since = time.monotonic()
    for number, strike in enumerate(strikes, 1):
        if not strike.early:
            target.wait_until_whole()
            whole_at = time.monotonic()
            target.until(
                lambda whole_at=whole_at: load.running(whole_at) >= UNDER_WAY * streams,
                f"{UNDER_WAY:.0%} of the streams go on after strike {number - 1}",
                UNDER_WAY_WITHIN_S,
            )
            since = whole_at
        target.rest(strike.delay_s)
        struck = _strike(target, load, strike, since)
        done.append(struck)
        wrong = sum(bool(checked.findings) for checked in list(load.checked))
        say(
            f"{number}/{len(strikes)} {strike.kind}{' (early)' if strike.early else ''}: {struck.proof or 'FAILED'} "
            f"{struck.detail}after {struck.ended - struck.began:.2f} s; {struck.streams} streams under way, "
            f"{len(load.checked)} ended, {wrong} wrong"
        )
    target.wait_until_whole()


def _strike(target: View, load: Load, strike: Strike, since: float) -> Struck:
    streams, began = load.running(since), time.monotonic()
    try:
        draw = random.Random(strike.seed)
        if isinstance(target, Target):
            proof = FAULTS[strike.kind](target, draw)
        else:
            proof = ON_ANY_FARM[strike.kind](target, draw)
    except (NoEffect, Harm) as error:
        return Struck(strike, began, time.monotonic(), streams, None, f"{error} ")
    return Struck(strike, began, time.monotonic(), streams, proof)
