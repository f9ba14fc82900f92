"""Killing the agent of a private farm while it works: its ranks must not notice."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from control.keys import ModelKeys
from control.placement import farm
from control.redis.clients import SyncRedis
from control.redis.connection import read, run_every
from control.replicas import health
from ops.bench.recovery.strikes import (
    LIMIT_S,
    MODEL,
    STRIKE_AT,
    TICK_S,
    Scene,
    finished,
    submit,
    wait_for_length,
    wait_until_whole,
)

OBSERVED_S = 2.0
"""How long the streams are looked at after the strike, at least."""
PAUSE_LIMIT_S = 0.2
ADOPTION_LIMIT_S = 2.0


@dataclass(frozen=True)
class AgentStrike:
    """One SIGKILL of the agent under load."""

    pause_s: float
    """The longest time for which no stream got a token."""
    adopted_s: float
    """Until the next agent beat, which it does once it has adopted."""
    kept: bool
    """True if ranks and epoch are the same as before."""
    same: int
    streams: int

    @property
    def holds(self) -> bool:
        """True if every limit holds."""
        within = self.pause_s <= PAUSE_LIMIT_S and self.adopted_s <= ADOPTION_LIMIT_S
        return within and self.kept and self.same == self.streams


def strike_agent(scene: Scene, streams: int) -> AgentStrike:
    """Keep `streams` requests under way and kill the agent in the midst of them."""
    client, before = scene.client, (wait_until_whole(scene.client), _pids(scene.client))
    [(host, agent)] = farm.agents(client).items()
    rids = [submit(client, scene.prompt, len(scene.expected)) for _ in range(streams)]
    wait_for_length(client, rids[0], STRIKE_AT)
    os.kill(agent, signal.SIGKILL)
    struck = last = time.monotonic()
    tokens, longest, adopted = 0, 0.0, None
    running = list(rids)
    while adopted is None or time.monotonic() - struck < OBSERVED_S:
        lengths, states = _progress(client, rids, running)
        now = time.monotonic()
        if lengths != tokens:
            tokens, longest, last = lengths, max(longest, now - last), now
        running = [rid for rid, state in zip(running, states, strict=True) if state != "finished"]
        new = [submit(client, scene.prompt, len(scene.expected)) for _ in range(streams - len(running))]
        rids, running = rids + new, running + new
        if adopted is None and farm.agents(client).get(host) not in (None, agent):
            adopted = now - struck
        if now - struck > LIMIT_S:
            raise SystemExit(f"the agent was not replaced within {LIMIT_S:.0f} s")
        time.sleep(TICK_S)
    longest = max(longest, time.monotonic() - last)
    kept = (health.read_epoch(client, MODEL, "r0"), _pids(client)) == before
    same = sum(answer == scene.expected for answer in finished(client, rids))
    return AgentStrike(longest, adopted, kept, same, len(rids))


def _pids(client: SyncRedis) -> list[int]:
    return [beat.pid if beat is not None else 0 for beat in health.heartbeats(client, MODEL, "r0", 2)]


def _progress(client: SyncRedis, rids: list[str], running: list[str]) -> tuple[int, list[str]]:
    """Entries in the logs of all requests, and the state of those that run."""
    keys = ModelKeys(MODEL)
    lengths = run_every(client, [read("XLEN", keys.log(rid), parse=int) for rid in rids])
    states = run_every(client, [read("HGET", keys.request(rid), "state", parse=str) for rid in running])
    return sum(lengths), states


def describe_agent_strikes(strikes: list[AgentStrike]) -> str:
    """Each limit beside its value."""
    same = f"{sum(one.same for one in strikes)}/{sum(one.streams for one in strikes)}"
    kept = f"{sum(one.kept for one in strikes)}/{len(strikes)}"
    return (
        f"agent killed      strikes {len(strikes)}; longest pause of all streams "
        f"{max(one.pause_s for one in strikes):.3f} s (limit {PAUSE_LIMIT_S} s); adopted after "
        f"{max(one.adopted_s for one in strikes):.2f} s at worst (limit {ADOPTION_LIMIT_S} s); "
        f"ranks and epoch kept {kept}; same text {same}"
    )
