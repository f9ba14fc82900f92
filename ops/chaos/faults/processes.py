"""Processes that are killed or stopped: ranks, the leader, the agent, an API."""

from __future__ import annotations

import random
import signal
from contextlib import suppress

import psutil

from control.connection import run
from control.messages import GenerationRequest, Sampling
from control.requests import Enqueue, enqueue
from ops.chaos.errors import ChaosError, NoEffect
from ops.chaos.faults.fault import Fault
from ops.chaos.target import Target

LONG_PROMPT = 1500
"""Tokens."""


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
        try:
            return replaced(target, rank, pid, epoch)
        except NoEffect:
            target.send(pid, signal.SIGCONT)  # nobody noticed that it hangs: the other strikes can go on all the same
            raise

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


def long_request(model: str, random: random.Random) -> Enqueue:
    """A prompt whose prefill and whose place in the cache need more memory than decoding has left over."""
    prompt = [random.randrange(10, 100) for _ in range(LONG_PROMPT)]
    params = GenerationRequest(prompt=prompt, sampling=Sampling(max_tokens=1))
    return Enqueue(rid=f"{random.getrandbits(128):032x}", model=model, params=params, tenant="chaos")


def starve(target: Target, random: random.Random) -> str:
    """Let a rank have no more memory than it has, and ask for more with a long prompt, until an allocation fails."""
    rank = random.randrange(target.spec.tp)
    pid, epoch = target.rank_pid(rank), target.epoch()
    process = psutil.Process(pid)
    before = process.rlimit(psutil.RLIMIT_AS)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms // 2, before[1]))
    try:
        run(target.client, enqueue(long_request(target.spec.name, random)))
        poison = target.until(
            lambda: next((one for one in target.poisons() if one.epoch >= epoch), None),
            f"rank {rank} runs out of memory",
        )
    except ChaosError as error:
        raise NoEffect(f"rank {rank} (pid {pid}) went on with the memory that it had: {error}") from error
    finally:
        with suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_AS, before)
    return f"rank {rank} (pid {pid}): {poison.kind}: {poison.message[:80]}"


FAULTS: dict[str, Fault] = {
    "rank-kill": strike_rank(1, signal.SIGKILL),
    "leader-kill": strike_rank(0, signal.SIGKILL),
    "rank-stop": strike_rank(1, signal.SIGSTOP),
    "leader-stop": strike_rank(0, signal.SIGSTOP),
    "agent-kill": kill_agent,
    "api-kill": kill_api,
    "out-of-memory": starve,
}
