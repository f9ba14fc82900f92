"""Processes that are killed or stopped: ranks, the leader, the agent, an API."""

from __future__ import annotations

import random
import signal

from ops.chaos.errors import ChaosError, NoEffect
from ops.chaos.faults.fault import Fault
from ops.chaos.target import Target

STOPPED_FOUND_WITHIN_S = 30.0


def replaced(target: Target, rank: int, pid: int, epoch: int, within_s: float = 60.0) -> str:
    """The proof that a rank process has gone: another one is the rank, in a later epoch."""

    def newcomer() -> int | None:
        now = target.rank_pids().get(rank)
        return now if now not in (None, pid) and target.epoch() > epoch else None

    try:
        return f"pid {pid} -> {target.until(newcomer, f'rank {rank} is another process', within_s)}"
    except ChaosError as error:
        raise NoEffect(f"rank {rank} (pid {pid}, epoch {epoch}): {error}") from error


def strike_rank(rank: int, number: signal.Signals) -> Fault:
    """Send a signal to one rank of the group."""

    def strike(target: Target, random: random.Random) -> str:
        pid, epoch = target.rank_pid(rank), target.epoch()
        target.send(pid, number)
        return replaced(target, rank, pid, epoch)

    return strike


def kill_agent(target: Target, random: random.Random) -> str:
    """SIGKILL to the agent; every rank of the host goes with it."""
    pid, ranks = target.until(lambda: target.agent_pid, "the agent runs"), target.rank_pids()
    target.send(pid, signal.SIGKILL)
    now = target.until(lambda: target.agent_pid if target.agent_pid != pid else None, "another agent runs")
    for rank, rank_pid in ranks.items():
        target.until(lambda rank=rank, old=rank_pid: target.rank_pids().get(rank) not in (None, old), "other ranks")
    return f"agent pid {pid} -> {now}, and {len(ranks)} ranks with it"


def kill_api(target: Target, random: random.Random) -> str:
    """SIGKILL to one of the API processes; its clients' sockets are cut."""
    index = random.randrange(len(target.ports))
    pid = target.until(lambda: target.api_pid(index), "the API runs")
    target.send(pid, signal.SIGKILL)
    now = target.until(lambda: (found := target.api_pid(index)) != pid and found, "another API process runs")
    return f"api {index + 1} pid {pid} -> {now}"


FAULTS: dict[str, Fault] = {
    "rank-kill": strike_rank(1, signal.SIGKILL),
    "leader-kill": strike_rank(0, signal.SIGKILL),
    "rank-stop": strike_rank(1, signal.SIGSTOP),
    "leader-stop": strike_rank(0, signal.SIGSTOP),
    "agent-kill": kill_agent,
    "api-kill": kill_api,
}
