"""The leader commands its ranks: scripted ranks on real streams; order, accounting, and whose fault it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
import structlog
from structlog.testing import capture_logs

from control.commands import (
    AnyCommand,
    GenerateStep,
    GenerateStepOk,
    Init,
    LoadDenseShard,
    LoadDenseShardOk,
    NcclSanityCheck,
    Ping,
    Pong,
    Reply,
    ShutdownRank,
)
from control.errors import CollectiveFailed, CollectiveLeft, GroupError, Lost, Poisoned, RankError, SettingsError
from control.messages import encode
from control.replicas.health import write_poison
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.integration.worker.leader.group_scene import WORLD, Scene
from tests.integration.worker.scripted_rank import Answer, failing, silent, well
from tests.waiting import until

Play = Callable[[Answer], Scene]


@pytest.fixture
def play(redis: ReplicaRedis) -> Iterator[Play]:
    scenes: list[Scene] = []

    def start(answer: Answer = well) -> Scene:
        scenes.append(Scene(redis, answer))
        return scenes[-1]

    yield start
    for scene in scenes:
        scene.stop()


def test_a_group_forms_in_order_and_is_as_roomy_as_its_tightest_rank(play: Play) -> None:
    """Ping, rendezvous, sum, load: each goes to every rank first; the leader joins once all were told."""
    scene = play(well)
    kv_tokens, formation = scene.group.form(scene.load)
    assert kv_tokens == 1000 - (WORLD - 1)
    times = [formation.led, formation.gathered, formation.joined, formation.loaded]
    assert times == sorted(times) and formation.epoch == scene.lease.epoch
    assert scene.own.joined_after == [WORLD - 1]
    for rank in scene.ranks:
        assert [type(command) for command in rank.heard] == [Ping, Init, NcclSanityCheck, LoadDenseShard]
        assert [command.seq for command in rank.heard] == [1, 2, 3, 4]
    assert scene.progress.phase == "ready" and scene.progress.seq == 4


def test_a_loopback_address_is_refused_by_name_on_several_machines(play: Play) -> None:
    """Ranks elsewhere would look for the leader on their own machine: each host and the remedy are named at once."""

    def elsewhere(rank: int, world_size: int, command: AnyCommand) -> Reply:
        reply = well(rank, world_size, command)
        network = "far" if rank == 2 else "near"
        return msgspec.structs.replace(reply, host=f"h{rank}", network=network) if isinstance(reply, Pong) else reply

    scene = play(elsewhere)
    scene.own.answer = lambda command: elsewhere(0, WORLD, command)  # type: ignore[method-assign]
    with pytest.raises(SettingsError) as refused:
        scene.group.form(scene.load)
    for words in ("host 'h0'", "127.0.0.1", "rank 2 on host 'h2'", "--address", "FURROW_ADDRESS"):
        assert words in str(refused.value)
    assert "h1" not in str(refused.value)
    assert [type(command) for rank in scene.ranks for command in rank.heard] == [Ping, Ping]


def test_a_command_that_must_be_sent_twice_arrives_while_the_leader_works(play: Play) -> None:
    """The server has lost its scripts; the leader's part waits for the others, as in a collective, and they come."""
    scene = play(well)
    scene.redis.client.script_flush()
    assert scene.step(lambda: until(lambda: all(rank.heard for rank in scene.ranks))) == 1


def test_a_pong_of_another_rank_names_both(play: Play) -> None:
    """The error quotes the reply, beside the rank that was expected."""
    scene = play(well)
    wrong = Pong(epoch=scene.lease.epoch, seq=1, rank=2, world_size=WORLD, cuda_device="cpu")
    scene.own.answer = lambda _command: wrong  # type: ignore[method-assign]
    with pytest.raises(GroupError) as caught:
        scene.group.ping(5.0)
    assert caught.value.ranks[0].rank == 0 and "rank=2" in str(caught.value)


def test_a_sum_that_is_wrong_names_rank_and_value(play: Play) -> None:
    """The sanity check fails on the rank that saw something else than the world size."""

    def adds_up_wrong(rank: int, world_size: int, command: AnyCommand) -> Reply:
        seen = world_size - 1 if rank == 2 else world_size
        return well(rank, seen if isinstance(command, NcclSanityCheck) else world_size, command)

    scene = play(adds_up_wrong)
    with pytest.raises(GroupError, match=r"rank 2: nccl_init_failed: saw a sum of 2, expected 3") as caught:
        scene.group.form(scene.load)
    assert [error.rank for error in caught.value.ranks] == [2]


def test_a_load_that_fails_names_every_rank_that_failed(play: Play) -> None:
    """One failure aborts the whole load, and none hides another."""

    def none_loads(rank: int, world_size: int, command: AnyCommand) -> Reply:
        return failing("load_failed", f"disk {rank} is full", LoadDenseShard, rank)(rank, world_size, command)

    scene = play(none_loads)
    with pytest.raises(GroupError) as caught:
        scene.group.form(scene.load)
    assert [(error.rank, error.kind) for error in caught.value.ranks] == [(1, "load_failed"), (2, "load_failed")]
    assert "disk 1 is full" in str(caught.value) and "disk 2 is full" in str(caught.value)


def test_a_rank_that_loaded_other_shares_ends_the_epoch(play: Play) -> None:
    """One of an older version loads even shares, and says none: the sums would be wrong."""

    def of_older_version(rank: int, world_size: int, command: AnyCommand) -> Reply:
        reply = well(rank, world_size, command)
        if isinstance(reply, LoadDenseShardOk) and rank != 2:
            return msgspec.structs.replace(reply, shares=[2, 1, 1])
        return reply

    scene = play(of_older_version)
    scene.own.answer = lambda command: of_older_version(0, WORLD, command)  # type: ignore[method-assign]
    with pytest.raises(GroupError, match=r"rank 2.*it has the shares \[\] of the model, not \[2, 1, 1\]: upgrade"):
        scene.group.form(lambda **at: msgspec.structs.replace(scene.load(**at), shares=[2, 1, 1]))


def test_both_sides_of_a_double_failure_are_told(play: Play) -> None:
    """The leader's own error does not hide the ranks', nor theirs its own; its cause stays attached."""
    scene = play(failing("forward_failed", "no memory left", GenerateStep, 1))
    scene.own.failure = RuntimeError("illegal address")
    with pytest.raises(GroupError) as caught:
        scene.step()
    assert str(caught.value) == (
        "leader step failed: illegal address and ranks also failed: rank 1: forward_failed: no memory left"
    )
    assert caught.value.__cause__ is scene.own.failure


def test_a_failed_step_is_logged_with_both_sides_its_seq_and_its_time(play: Play) -> None:
    """One line for the operator has the step, how long it took, both sides, and the leader's chain of causes."""
    scene = play(failing("forward_failed", "no memory left", GenerateStep, 1))
    scene.own.failure = RankError(0, "forward_failed", "RuntimeError: illegal address (rows 7: 3 at 0)")
    with structlog.testing.capture_logs() as lines, pytest.raises(GroupError):
        scene.step()
    [line] = [line for line in lines if line["event"] == "a command failed"]
    assert line["command"] == "step" and line["seq"] == 1 and line["ms"] >= 0 and line["exc_info"] is scene.own.failure
    assert "rows 7: 3 at 0" in line["leader"] and line["ranks"] == ["rank 1: forward_failed: no memory left"]


def test_after_a_failure_the_next_reply_is_the_next_commands(play: Play) -> None:
    """Every rank's reply to the failed step is accounted for, so the next step reads its own."""
    scene = play(well)
    scene.own.failure = RuntimeError("host trouble")
    with pytest.raises(GroupError, match=r"leader step failed: host trouble$"):
        scene.step()
    scene.own.failure = None
    assert scene.step() == 2
    assert scene.group.stale_replies == 0


def test_a_reply_that_comes_too_late_is_counted_and_dropped(play: Play) -> None:
    """A reply to an older step, or of another epoch, is never taken for a reply to this step."""
    scene = play(well)
    scene.step()
    for stale in (
        GenerateStepOk(epoch=scene.lease.epoch, seq=1, rank=1, checksum=99),
        GenerateStepOk(epoch=scene.lease.epoch - 1, seq=2, rank=1, checksum=99),
    ):
        stream = scene.redis.keys.replies(scene.lease.epoch)
        scene.redis.client.xadd(stream, {"m": encode(stale)})
    assert scene.step() == 2
    assert scene.group.stale_replies == 2


def test_a_rank_that_computed_another_batch_is_named(play: Play) -> None:
    """A checksum that differs is caught at that very step, and is no token's worth of doubt later."""

    def diverges(rank: int, world_size: int, command: AnyCommand) -> Reply:
        reply = well(rank, world_size, command)
        off = rank == 2 and isinstance(reply, GenerateStepOk) and reply.seq == 2
        return GenerateStepOk(epoch=reply.epoch, seq=reply.seq, rank=rank, checksum=5) if off else reply

    scene = play(diverges)
    scene.step()
    with pytest.raises(GroupError, match=r"rank 2: forward_failed: its batch of step 2 differs") as caught:
        scene.step()
    assert [error.rank for error in caught.value.ranks] == [2]


def test_a_rank_that_is_gone_is_named(play: Play) -> None:
    """When the deadline of a command passes the error says which rank did not answer."""
    scene = play(silent(Ping, 2))
    with pytest.raises(Poisoned, match=r"rank 2$") as caught:
        scene.group.ping(0.2)
    assert (caught.value.kind, caught.value.rank) == ("deadline", 2)


def test_a_leader_that_failed_does_not_wait_long_for_those_who_wait_for_it(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks may hang in a collective with it; the leader's error comes out, with their silence beside it."""
    monkeypatch.setattr("worker.leader.group.DRAIN_S", 0.1)
    scene = play(silent(GenerateStep, 1))
    scene.own.failure = RuntimeError("illegal address")
    with pytest.raises(GroupError, match=r"illegal address and ranks also failed: rank 1: .* no reply to command 1"):
        scene.step()


def caused(cause: Exception) -> RankError:
    """As the engine wraps what a forward raises."""
    error = RankError(0, "forward_failed", f"{type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("cause", "traced"), [(CollectiveFailed("rank 1 has died"), False), (ValueError("a defect"), True)]
)
def test_another_rank_s_end_is_one_line(play: Play, cause: Exception, traced: bool) -> None:
    """Where this side's failure is only that of a collective, its traceback has nothing to tell."""
    scene = play(well)
    scene.own.failure = caused(cause)
    with capture_logs() as logs, pytest.raises(GroupError):
        scene.step()
    [line] = [line for line in logs if line["event"] == "a command failed"]
    assert str(cause) in line["leader"] and bool(line["exc_info"]) is traced


def test_a_leader_that_was_let_go_says_why_its_epoch_ended(play: Play) -> None:
    """It left the collective because the epoch is over: no step failed, and nobody's reply is waited for."""

    def over() -> None:
        raise Lost("the lock has lapsed")

    scene = play(silent(GenerateStep, 1))
    scene.own.failure = caused(CollectiveLeft("the lock has lapsed"))
    with pytest.raises(Lost):
        scene.step(lambda: setattr(scene.group, "_check", over))


def test_a_poisoned_epoch_ends_the_wait(play: Play) -> None:
    """A leader that waits for a dead rank hears of its death at once, not at the deadline."""
    scene = play(silent(Ping, 1))
    write_poison(scene.redis.client, MODEL, REPLICA, scene.lease.epoch, 1, "exited", "rank 1 was killed")
    with pytest.raises(Poisoned, match="rank 1 was killed"):
        scene.group.ping(60.0)


def test_a_reply_of_another_kind_is_quoted(play: Play) -> None:
    """A rank that answers a step with something else shows what it said."""

    def confused(rank: int, world_size: int, command: AnyCommand) -> Reply:
        if rank == 1 and isinstance(command, GenerateStep):
            return Pong(epoch=command.epoch, seq=command.seq, rank=1, world_size=world_size, cuda_device="cpu")
        return well(rank, world_size, command)

    scene = play(confused)
    with pytest.raises(GroupError, match=r"rank 1: bad_request: unexpected reply Pong"):
        scene.step()


def test_a_shutdown_reaches_every_rank_whatever_one_of_them_does(play: Play) -> None:
    """One rank's refusal neither stops the sweep nor leaves the leader with an error."""
    scene = play(failing("bad_request", "not now", ShutdownRank, 1))
    scene.group.shutdown()
    assert [type(rank.heard[-1]) for rank in scene.ranks] == [ShutdownRank, ShutdownRank]
