"""Processes that are killed or stopped: ranks, the leader, the agent, an API, an external engine."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from control.messages import GenerationRequest, Sampling
from control.placement import membership
from control.redis.connection import run
from control.requests import Enqueue, cancel, enqueue
from ops.chaos.errors import NoEffect
from ops.chaos.faults.fault import Fault
from ops.chaos.system.target import PROVED_WITHIN_S, Target, View

LONG_PROMPT = 8000
"""Tokens."""
BETWEEN_S = 0.15
"""The time between two epochs is a part of this where a standby is ready."""


def successor(target: View, current: Callable[[], int | None], pid: int, epoch: int, process_name: str) -> str:
    """The proof that a process has gone: another one is in its place, in a later epoch. Without it the process goes on
    where it was stopped, as the hang was not detected, and other strikes follow."""

    def newcomer() -> int | None:
        now = current()
        return now if now not in (None, pid) and target.epoch() > epoch else None

    try:
        return (
            f"pid {pid} -> {target.proved(newcomer, f'{process_name} is not pid {pid}, in a later epoch than {epoch}')}"
        )
    except NoEffect:
        target.send(pid, signal.SIGCONT)
        raise


def replaced(target: View, rank: int, pid: int, epoch: int) -> str:
    """The successor of a rank's process."""
    return successor(target, lambda: target.rank_pids().get(rank), pid, epoch, f"rank {rank}")


def strike_rank(rank: int, number: signal.Signals) -> Callable[[View, random.Random], str]:
    """Send a signal to one rank of the group."""

    def strike(target: View, random: random.Random) -> str:
        pid = target.rank_pid(rank)
        epoch = target.epoch()
        target.send(pid, number)
        return replaced(target, rank, pid, epoch)

    return strike


def stop_in_recovery(target: View, random: random.Random) -> str:
    """Kill one rank, and stop another while the group is between two epochs or on its way into the next."""
    killed, stopped = random.sample(range(target.spec.tp), 2) if target.spec.tp > 1 else (0, 0)
    killed_pid = target.rank_pid(killed)
    pid = target.rank_pid(stopped)
    epoch = target.epoch()
    target.send(killed_pid, signal.SIGKILL)
    time.sleep(random.uniform(0, BETWEEN_S))
    target.send(pid, signal.SIGSTOP)
    return f"rank {stopped} stopped after rank {killed} was killed: {replaced(target, stopped, pid, epoch)}"


def next_agent(target: Target, pid: int) -> int:
    """The agent after `pid`, once it beats: it has adopted what was there."""
    agent = target.proved(lambda: now if (now := target.agent_pid) != pid else None, "another agent runs")
    target.proved(lambda: agent in membership.agents(target.client).values(), f"the new agent (pid {agent}) beats")
    return agent


def kill_agent(target: Target, random: random.Random) -> str:
    """SIGKILL to the agent: its ranks live on, and the next agent adopts them."""
    pid = target.proved(lambda: target.agent_pid, "the agent runs")
    ranks = target.rank_pids()
    whole = target.overview().state == "loaded"
    epoch = target.epoch()
    target.send(pid, signal.SIGKILL)
    began = time.monotonic()
    now = next_agent(target, pid)
    took = time.monotonic() - began
    if whole and (target.rank_pids(), target.epoch()) != (ranks, epoch):
        raise NoEffect(f"ranks {ranks} of epoch {epoch} became {target.rank_pids()} of epoch {target.epoch()}")
    rest = f"{len(ranks)} ranks and epoch {epoch} kept" if whole else "in a recovery"
    return f"agent pid {pid} -> {now} after {took:.1f} s, {rest}"


def kill_agent_and_rank(target: Target, random: random.Random) -> str:
    """SIGKILL to a rank and to the agent at once: the next agent learns from the supervisor how the rank ended."""
    agent = target.proved(lambda: target.agent_pid, "the agent runs")
    rank = random.randrange(target.spec.tp)
    pid = target.rank_pid(rank)
    epoch = target.epoch()
    for victim in random.sample([agent, pid], 2):
        target.send(victim, signal.SIGKILL)
    now = next_agent(target, agent)
    return f"agent pid {agent} -> {now}; rank {rank}: {replaced(target, rank, pid, epoch)}"


def kill_api(target: Target, random: random.Random) -> str:
    """SIGKILL to one of the API processes; its clients' sockets are cut."""
    index = random.randrange(len(target.ports))
    pid = target.proved(lambda: target.api_pid(index), "the API runs")
    target.send(pid, signal.SIGKILL)
    now = target.proved(lambda: now if (now := target.api_pid(index)) != pid else None, "another API process runs")
    return f"api {index + 1} pid {pid} -> {now}"


def long_request(model: str, random: random.Random) -> Enqueue:
    """A prompt whose prefill and whose place in the cache need more memory than decoding has left over."""
    prompt = [random.randrange(10, 100) for _ in range(LONG_PROMPT)]
    params = GenerationRequest(prompt=prompt, sampling=Sampling(max_tokens=1))
    return Enqueue(rid=f"{random.getrandbits(128):032x}", model=model, params=params, tenant="chaos")


def starve(target: View, random: random.Random) -> str:
    """Let a rank have no more memory than it has, and ask for more with a long prompt, until an allocation fails."""
    rank = random.randrange(target.spec.tp)
    pid = target.rank_pid(rank)
    epoch = target.epoch()
    process = psutil.Process(pid)
    before = process.rlimit(psutil.RLIMIT_AS)
    request = long_request(target.spec.name, random)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms // 2, before[1]))
    try:
        run(target.client, enqueue(request))
        event = f"rank {rank} (pid {pid}) needs more memory than it has"
        poison = target.proved(lambda: next((entry for entry in target.poisons() if entry.epoch >= epoch), None), event)
    finally:
        with suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_AS, before)
        run(target.client, cancel(target.spec.name, request.rid, request.tenant))
    return f"rank {rank} (pid {pid}): {poison.kind}: {poison.message[:80]}"


def strike_engine(number: signal.Signals) -> Callable[[Target, random.Random], str]:
    """Send a signal to the engine; the proof is another process in a later epoch."""

    def strike(target: Target, random: random.Random) -> str:
        pid = target.until(lambda: target.engine_pid, "the engine has a process", PROVED_WITHIN_S)
        epoch = target.epoch()
        target.send(pid, number)
        return successor(target, lambda: target.engine_pid, pid, epoch, "the engine")

    return strike


ON_ANY_FARM: dict[str, Callable[[View, random.Random], str]] = {
    "rank-kill": strike_rank(1, signal.SIGKILL),
    "leader-kill": strike_rank(0, signal.SIGKILL),
    "rank-stop": strike_rank(1, signal.SIGSTOP),
    "leader-stop": strike_rank(0, signal.SIGSTOP),
    "stop-in-recovery": stop_in_recovery,
    "out-of-memory": starve,
}
"""Need nothing but the ranks' processes, so a farm that somebody else runs can be struck too."""

FAULTS: dict[str, Fault] = {
    **ON_ANY_FARM,
    "agent-kill": kill_agent,
    "agent-and-rank-kill": kill_agent_and_rank,
    "api-kill": kill_api,
}

ENGINE_FAULTS: dict[str, Fault] = {
    "engine-kill": strike_engine(signal.SIGKILL),
    "engine-stop": strike_engine(signal.SIGSTOP),
}
"""Of a model on an external engine."""
