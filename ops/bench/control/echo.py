"""A rank that acknowledges every command at once. Apart from `stepping`, whose imports would delay its start."""

from __future__ import annotations

from control.commands import AnyCommand, GenerateStepOk, Ping, Pong, Reply, decode_command
from control.redis.connection import connect, connect_blocking
from control.replicas import commands


def echo(url: str, model: str, replica: str, epoch: int, rank: int) -> None:
    """Until it is killed."""
    mailbox = commands.Mailbox(connect_blocking(url), model, replica, epoch, rank)
    client = connect(url)
    while True:
        frame = mailbox.receive(1_000)
        if frame is not None:
            commands.reply(client, model, replica, answer(decode_command(frame), rank))


def answer(command: AnyCommand, rank: int) -> Reply:
    """A pong, or that the step is done."""
    if isinstance(command, Ping):
        return Pong(epoch=command.epoch, seq=command.seq, rank=rank, world_size=rank + 1, cuda_device="cpu")
    return GenerateStepOk(epoch=command.epoch, seq=command.seq, rank=rank, checksum=command.seq)
