"""`python -m ops.bench.control.echo URL MODEL REPLICA EPOCH RANK`: a rank that acknowledges every command at once."""

from __future__ import annotations

import sys

from control.commands import AnyCommand, GenerateStepOk, Ping, Pong, Reply, decode_command
from control.redis.connection import connect, connect_blocking
from control.replicas import commands


def main() -> None:
    url, model, replica, epoch, rank = sys.argv[1:]
    mailbox = commands.Mailbox(connect_blocking(url), model, replica, int(epoch), int(rank))
    client = connect(url)
    while True:
        frame = mailbox.receive(1_000)
        if frame is not None:
            commands.reply(client, model, replica, answer(decode_command(frame), int(rank)))


def answer(command: AnyCommand, rank: int) -> Reply:
    """A pong, or that the step is done."""
    if isinstance(command, Ping):
        return Pong(epoch=command.epoch, seq=command.seq, rank=rank, world_size=rank + 1, cuda_device="cpu")
    return GenerateStepOk(epoch=command.epoch, seq=command.seq, rank=rank, checksum=command.seq)


if __name__ == "__main__":
    main()
