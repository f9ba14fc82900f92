"""Ranks killed at a certain moment: during the load of the model, and inside a collective.

The victim is stopped first, so that it can be looked at; where it has got past the moment it goes on, and the next
chance is waited for.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from control.errors import CollectiveFailed
from control.keys import ReplicaKeys
from control.redis.connection import read, run_every
from ops.chaos.errors import NoEffect
from ops.chaos.faults.fault import Fault
from ops.chaos.faults.processes import replaced
from ops.chaos.system.target import Target

TRIES = 5
LOAD = "load_dense_shard"
STEP = "generate_step"
MOMENT_WITHIN_S = 240.0
"""Limit until a killed rank loads: it may have to start and import first."""
TICK_S = 0.002
MET_WITHIN_S = 5.0


class Word(msgspec.Struct):
    """The fields of a command or a reply that a strike needs."""

    op: str
    seq: int
    rank: int = 0


_decode = msgspec.json.Decoder(Word).decode


def newest(target: Target, epoch: int) -> tuple[Word | None, Word | None]:
    """The newest command to rank 1 in `epoch`, and the newest reply."""
    keys = ReplicaKeys(target.spec.name, target.replica)

    def parse(reply: list[tuple[str, dict[str, str]]]) -> Word | None:
        return _decode(reply[0][1]["m"]) if reply else None

    streams = keys.commands(epoch, 1), keys.replies(epoch)
    command, reply = run_every(
        target.client, [read("XREVRANGE", stream, "+", "-", "COUNT", 1, parse=parse) for stream in streams]
    )
    return command, reply


def under_way(target: Target, rank: int, op: str, after: int) -> tuple[int, int] | None:
    """Epoch and seq of a command `op` that the rank is at, in an epoch later than `after`.

    Rank 1 is at it until its reply. The leader sends no reply for its own part of a load: it is at it until its next
    command.
    """
    epoch = target.epoch()
    if epoch <= after:
        return None
    command, reply = newest(target, epoch)
    if command is None or command.op != op:
        return None
    if (rank or op != LOAD) and reply is not None and reply.seq >= command.seq:
        return None
    return epoch, command.seq


def catch(target: Target, rank: int, op: str, after: int, past: Callable[[], bool]) -> tuple[int, int, int] | None:
    """Stop the rank while it is at `op`; its pid, the epoch and the seq, None once `past` it. Raises NoEffect."""
    while not past():
        target.proved(
            lambda: under_way(target, rank, op, after) or past(), f"{op} is executed", MOMENT_WITHIN_S, TICK_S
        )
        pid = target.rank_pids().get(rank)
        if pid is None:
            continue
        target.send(pid, signal.SIGSTOP)
        if (moment := under_way(target, rank, op, after)) is not None:
            return pid, *moment
        target.send(pid, signal.SIGCONT)
    return None


def exit_in_load(target: Target, random: random.Random) -> str:
    """Kill a rank, and kill its successor during the load of its shard."""
    rank = random.randrange(target.spec.tp)
    for _ in range(TRIES):
        pid = target.rank_pid(rank)
        first = target.epoch()
        target.send(pid, signal.SIGKILL)
        caught = catch(target, rank, LOAD, first, lambda first=first: serves(target, first))
        if caught is not None:
            pid, epoch, seq = caught
            target.send(pid, signal.SIGKILL)
            return f"{replaced(target, rank, pid, epoch)}, killed in command {seq} of epoch {epoch}, {LOAD}"
    raise NoEffect(f"rank {rank} was killed {TRIES} times, and its successor never caught while it loads")


def serves(target: Target, after: int) -> bool:
    """True if an epoch later than `after` has begun its steps."""
    epoch = target.epoch()
    command = newest(target, epoch)[0] if epoch > after else None
    return command is not None and command.op == STEP


def exit_in_collective(target: Target, random: random.Random) -> str:
    """Kill a rank in a step, so that its peer waits in a collective; the peer's log line is the proof."""
    rank = random.randrange(target.spec.tp)
    for _ in range(TRIES):
        caught = catch(target, rank, STEP, 0, lambda: False)
        assert caught is not None
        pid, epoch, seq = caught
        written = target.log.stat().st_size
        time.sleep(random.uniform(0.01, 0.05))  # the peer reaches the collective
        target.send(pid, signal.SIGKILL)
        proof = replaced(target, rank, pid, epoch)
        if logs_word(target, written, CollectiveFailed.__name__):
            return f"{proof}, killed in command {seq} of epoch {epoch}: the peer's collective failed"
    raise NoEffect(f"rank {rank} was killed in {TRIES} steps, and no peer said that a collective failed")


def logs_word(target: Target, offset: int, word: str) -> bool:
    """Wait for `word` in the farm's log beyond `offset`; False if it does not come."""

    def there() -> bool:
        with target.log.open("rb") as log:
            log.seek(offset)
            return word.encode() in log.read()

    with suppress(NoEffect):
        return target.proved(there, f"the log says {word}", MET_WITHIN_S)
    return False


def needs_peers(fault: Callable[[Target, random.Random], str]) -> Fault:
    """A fault between two ranks. Raises NoEffect where there is one."""

    def strike(target: Target, random: random.Random) -> str:
        if target.spec.tp == 1:
            raise NoEffect("one rank alone has no commands and no collectives; use --tp 2")
        return fault(target, random)

    return strike


FAULTS: dict[str, Fault] = {
    "exit-in-load": needs_peers(exit_in_load),
    "exit-in-collective": needs_peers(exit_in_collective),
}
