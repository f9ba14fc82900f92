"""Commands to ranks and their replies."""

from __future__ import annotations

import pytest

from control.commands import GenerateStepOk, Ping, Pong, decode_command
from control.errors import Lost, Poisoned
from control.replicas import commands
from control.replicas.commands import Deadline, Mailbox, Replies
from control.replicas.health import read_poison, write_poison
from control.replicas.lease import Lease
from tests.contract.conftest import MODEL, Farm


@pytest.fixture
def lease(farm: Farm) -> Lease:
    return farm.lead(world_size=3)


def ping(lease: Lease, seq: int) -> Ping:
    return Ping(epoch=lease.epoch, seq=seq)


def pong(lease: Lease, seq: int, rank: int, epoch: int | None = None) -> Pong:
    return Pong(epoch=epoch or lease.epoch, seq=seq, rank=rank, world_size=3, cuda_device="cpu")


def mailbox(farm: Farm, lease: Lease, rank: int = 1) -> Mailbox:
    return Mailbox(farm.blocking, MODEL, "r0", lease.epoch, rank)


def answer(farm: Farm, *replies: Pong) -> None:
    for reply in replies:
        commands.reply(farm.client, MODEL, "r0", reply)


def test_every_rank_gets_every_command_in_order(farm: Farm, lease: Lease) -> None:
    """Each rank receives the commands that are sent to all, seq by seq."""
    for seq in (1, 2):
        commands.send(farm.client, lease, ping(lease, seq), 3)
    for rank in (1, 2):
        box = mailbox(farm, lease, rank)
        received = [decode_command(frame) for frame in (box.receive(10), box.receive(10)) if frame is not None]
        assert received == [ping(lease, 1), ping(lease, 2)]
        assert box.receive(1) is None


def test_a_command_sent_twice_arrives_once(farm: Farm, lease: Lease) -> None:
    """A repeat whose first answer was lost is left alone on every stream."""
    commands.send(farm.client, lease, ping(lease, 1), 3)
    commands.send(farm.client, lease, ping(lease, 2), 3)
    commands.send(farm.client, lease, ping(lease, 1), 3)
    assert [farm.client.xlen(lease.keys.commands(lease.epoch, rank)) for rank in (1, 2)] == [2, 2]


def test_command_streams_do_not_outlive_their_epoch_for_long(farm: Farm, lease: Lease) -> None:
    """From the first command and the first reply on a stream has a life time."""
    commands.send(farm.client, lease, ping(lease, 1), 2)
    answer(farm, pong(lease, 1, 1))
    for stream in (lease.keys.commands(lease.epoch, 1), lease.keys.replies(lease.epoch)):
        assert 0 < farm.client.pttl(stream) <= 60_000


def test_each_rank_may_get_its_own(farm: Farm, lease: Lease) -> None:
    """One command per rank travels under one seq."""
    each = [ping(lease, 1), Ping(epoch=lease.epoch, seq=1)]
    commands.send(farm.client, lease, each, 3)
    assert mailbox(farm, lease, 2).receive(10) is not None
    with pytest.raises(ValueError, match="share one seq"):
        commands.send(farm.client, lease, [ping(lease, 2), ping(lease, 3)], 3)


def test_a_gap_in_the_commands_is_poison(farm: Farm, lease: Lease) -> None:
    """A rank that misses a command says so for all, and leaves."""
    commands.send(farm.client, lease, ping(lease, 1), 2)
    box = mailbox(farm, lease)
    assert box.receive(10) is not None
    commands.send(farm.client, lease, ping(lease, 3), 2)
    with pytest.raises(Poisoned, match="expected command 2 and got 3"):
        box.receive(10)
    poison = read_poison(farm.client, MODEL, "r0")
    assert poison is not None
    assert (poison.kind, poison.epoch, poison.rank) == ("gap", lease.epoch, 1)


def test_another_epochs_commands_can_not_be_read(farm: Farm, lease: Lease) -> None:
    """The epoch is in the key's name."""
    commands.send(farm.client, lease, ping(lease, 1), 2)
    assert Mailbox(farm.blocking, MODEL, "r0", lease.epoch + 1, 1).receive(1) is None


def test_poison_wakes_those_who_wait(farm: Farm, lease: Lease) -> None:
    """Mailbox and collector raise this epoch's poison, also one from before they looked, and no other's."""
    box, replies = mailbox(farm, lease), Replies(farm.blocking, lease, 3)
    farm.client.xadd(lease.keys.poisons, {"epoch": 1, "rank": 0, "kind": "old", "message": "long ago"})
    assert box.receive(1) is None
    write_poison(farm.client, MODEL, "r0", lease.epoch, 2, "exited", "rank 2 died")
    with pytest.raises(Poisoned, match="rank 2 died"):
        box.receive(10)
    with pytest.raises(Poisoned, match="rank 2 died"):
        replies.collect(1, Deadline(5))


def test_replies_come_in_rank_order(farm: Farm, lease: Lease) -> None:
    """One per rank, whatever order they arrive in."""
    answer(farm, pong(lease, 1, 2), pong(lease, 1, 1))
    assert [reply.rank for reply in Replies(farm.blocking, lease, 3).collect(1, Deadline(5))] == [1, 2]


def test_stale_replies_are_counted_and_dropped(farm: Farm, lease: Lease) -> None:
    """Another epoch's, an older seq's, a double and a stranger's reply are never taken for the awaited one."""
    replies = Replies(farm.blocking, lease, 3)
    answer(farm, pong(lease, 1, 1), pong(lease, 1, 2))
    replies.collect(1, Deadline(5))
    foreign = pong(lease, 2, 1, epoch=lease.epoch - 1)
    farm.client.xadd(lease.keys.replies(lease.epoch), {"m": commands.encode(foreign)})
    answer(farm, pong(lease, 1, 1), pong(lease, 2, 9), pong(lease, 2, 1), pong(lease, 2, 1), pong(lease, 2, 2))
    assert [reply.seq for reply in replies.collect(2, Deadline(5))] == [2, 2]
    assert replies.stale == 4


def test_an_early_reply_is_kept_for_its_turn(farm: Farm, lease: Lease) -> None:
    """A fast rank may be one command ahead."""
    replies = Replies(farm.blocking, lease, 3)
    step = GenerateStepOk(epoch=lease.epoch, seq=2, rank=2, checksum=5)
    answer(farm, pong(lease, 1, 2))
    commands.reply(farm.client, MODEL, "r0", step)
    answer(farm, pong(lease, 1, 1))
    assert [reply.rank for reply in replies.collect(1, Deadline(5))] == [1, 2]
    answer(farm, pong(lease, 2, 1))
    assert replies.collect(2, Deadline(5))[1] == step
    assert replies.stale == 0


def test_a_missing_reply_names_the_ranks(farm: Farm, lease: Lease) -> None:
    """When the deadline passes the error says who is missing."""
    answer(farm, pong(lease, 1, 1))
    with pytest.raises(Poisoned, match="rank 2") as missing:
        Replies(farm.blocking, lease, 3).collect(1, Deadline(0.05))
    assert (missing.value.kind, missing.value.rank) == ("deadline", 2)


def test_an_unreadable_reply_is_quoted(farm: Farm, lease: Lease) -> None:
    """The error shows what came."""
    farm.client.xadd(lease.keys.replies(lease.epoch), {"m": "{nonsense"})
    with pytest.raises(Poisoned, match=r"\{nonsense"):
        Replies(farm.blocking, lease, 3).collect(1, Deadline(5))


def test_a_world_of_one_needs_no_streams(farm: Farm, lease: Lease) -> None:
    """Without other ranks nothing is sent and nothing is awaited."""
    commands.send(farm.client, lease, ping(lease, 1), 1)
    assert Replies(farm.blocking, lease, 1).collect(1, Deadline(5)) == []
    assert farm.client.exists(lease.keys.commands(lease.epoch, 1)) == 0


def test_who_waits_for_replies_hears_that_the_epoch_is_over(farm: Farm, lease: Lease) -> None:
    """A reply that was lost with Redis is not waited for until the deadline, which a long prompt puts far away."""

    def check() -> None:
        raise Lost("the lock ran out")

    with pytest.raises(Lost):
        Replies(farm.blocking, lease, 3).collect(1, Deadline(3600.0), check)
