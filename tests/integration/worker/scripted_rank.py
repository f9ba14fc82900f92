"""Ranks 1..N-1 that answer by script: a thread on the real command and reply streams, with no model behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from control.commands import (
    AnyCommand,
    Bye,
    Command,
    ErrorReply,
    GenerateStep,
    GenerateStepOk,
    Init,
    InitOk,
    LoadDenseShard,
    LoadDenseShardOk,
    NcclSanityCheck,
    NcclSanityResult,
    Ping,
    Pong,
    Reply,
    ShutdownRank,
    decode_command,
)
from control.errors import EpochOver
from control.replicas import commands
from control.replicas.lease import Lease
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis

Answer = Callable[[int, int, AnyCommand], Reply | None]
"""(rank, world size, command) → the reply, or None for silence."""


def well(rank: int, world_size: int, command: AnyCommand) -> Reply:
    """The replies of a healthy rank; the checksum of a step is its seq."""
    head = {"epoch": command.epoch, "seq": command.seq, "rank": rank}
    match command:
        case Ping():
            return Pong(**head, world_size=world_size, cuda_device="cpu")
        case Init():
            return InitOk(**head)
        case NcclSanityCheck():
            return NcclSanityResult(**head, observed_sum=float(world_size))
        case LoadDenseShard():
            return LoadDenseShardOk(**head, kv_tokens=1000 - rank, weight_bytes=1)
        case GenerateStep():
            return GenerateStepOk(**head, checksum=command.seq)
        case ShutdownRank():
            return Bye(**head)
    raise AssertionError(f"no script for {command}")


def failing(kind: str, message: str, on: type[Command], rank: int) -> Answer:
    """Well, but for an `error` that `rank` gives to commands of type `on`."""

    def answer(mine: int, world_size: int, command: AnyCommand) -> Reply:
        if mine == rank and isinstance(command, on):
            return ErrorReply(epoch=command.epoch, seq=command.seq, rank=mine, kind=kind, message=message)  # type: ignore[arg-type]
        return well(mine, world_size, command)

    return answer


def silent(on: type[Command], rank: int) -> Answer:
    """Well, but `rank` gives no answer at all to commands of type `on`."""

    def answer(mine: int, world_size: int, command: AnyCommand) -> Reply | None:
        return None if mine == rank and isinstance(command, on) else well(mine, world_size, command)

    return answer


class ScriptedRank(threading.Thread):
    """Answers until `stop`, or until the epoch is over. `heard` are the commands in the order of their coming."""

    def __init__(self, redis: ReplicaRedis, lease: Lease, rank: int, world_size: int, answer: Answer) -> None:
        super().__init__(name=f"scripted-rank-{rank}", daemon=True)
        self._mailbox = commands.Mailbox(redis.blocking(), MODEL, REPLICA, lease.epoch, rank)
        self._client, self._rank, self._world_size, self._answer = redis.another(), rank, world_size, answer
        self._stopping = threading.Event()
        self.heard: list[AnyCommand] = []

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                frame = self._mailbox.receive(20)
                if frame is not None:
                    self.heard.append(decode_command(frame))
                    self._reply(self._answer(self._rank, self._world_size, self.heard[-1]))
        except EpochOver:
            return

    def _reply(self, reply: Reply | None) -> None:
        if reply is not None:
            commands.reply(self._client, MODEL, REPLICA, reply)

    def stop(self) -> None:
        self._stopping.set()
        self.join()
