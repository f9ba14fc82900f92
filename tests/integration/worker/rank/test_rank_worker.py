"""A rank answers each op of the wire: with a real tiny model, exactly one reply, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from control.commands import (
    AnyReply,
    BatchChange,
    ClearKvCache,
    ErrorReply,
    GenerateStep,
    GenerateStepWithImages,
    Init,
    KvCacheCleared,
    LoadDenseShard,
    LoadDenseShardOk,
    NcclSanityCheck,
    NcclSanityResult,
    Ping,
    Pong,
    ShutdownRank,
    StepImage,
    StepRow,
    Unloaded,
    UnloadModel,
    decode_reply,
)
from control.errors import CollectiveFailed, RankError
from control.messages import encode
from tests.models import make
from worker.collective.rendezvous import namespace
from worker.rank.rank_worker import RankWorker
from worker.repository import validation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"))


def load(folder: Path, epoch: int = 1, **changes: object) -> LoadDenseShard:
    files = validation.inspect(folder)
    fields = {"config_json": json.dumps(files.config), "safetensors_paths": [str(path) for path in files.weights]}
    return LoadDenseShard(epoch=epoch, seq=2, model_id="m", kv_tokens=500, **(fields | changes))  # type: ignore[arg-type]


def kind(reply: object) -> str:
    assert isinstance(reply, ErrorReply)
    return reply.kind


def test_ping_names_rank_world_and_device() -> None:
    """A pong says who answers."""
    reply = RankWorker(1, 2, "cpu").answer(Ping(epoch=3, seq=4))
    assert isinstance(reply, Pong)
    assert (reply.epoch, reply.seq, reply.rank, reply.world_size, reply.cuda_device) == (3, 4, 1, 2, "cpu")
    assert reply.host and reply.network == namespace("net")


def test_a_rank_refuses_commands_before_init() -> None:
    """A rank that has not joined its group refuses to load or to be summed up, and says what is missing."""
    rank = RankWorker(1, 2, "cpu")
    assert kind(rank.answer(NcclSanityCheck(epoch=1, seq=1))) == "nccl_not_initialised"
    assert kind(rank.answer(LoadDenseShard(epoch=1, seq=2, model_id="m", config_json="{}", safetensors_paths=[]))) == (
        "nccl_not_initialised"
    )


def test_init_refuses_another_world_size_naming_both() -> None:
    """The leader and its ranks must agree on the size before they meet."""
    reply = RankWorker(1, 2, "cpu").answer(Init(epoch=1, seq=1, world_size=3))
    assert isinstance(reply, ErrorReply) and reply.kind == "nccl_init_failed"
    assert "3" in reply.message and "2" in reply.message


def test_a_group_of_one_sums_to_one() -> None:
    """The sanity check needs no special case for a single rank."""
    reply = RankWorker(0, 1, "cpu").answer(NcclSanityCheck(epoch=1, seq=1))
    assert isinstance(reply, NcclSanityResult) and reply.observed_sum == 1.0


def test_load_step_clear_unload(folder: Path) -> None:
    """The life of a shard: every op in its order is answered in kind, and a step after the end is refused."""
    rank = RankWorker(0, 1, "cpu")
    command = GenerateStep(epoch=1, seq=3, model_id="m", change=BatchChange(rows=[StepRow(1, [1, 2, 3], 0, True)]))
    assert kind(rank.answer(ClearKvCache(epoch=1, seq=1, model_id="m"))) == "model_not_loaded"
    loaded = rank.answer(load(folder))
    assert isinstance(loaded, LoadDenseShardOk) and loaded.kv_tokens == 500 and loaded.weight_bytes > 0
    with rank.step(command) as step:
        assert step.forward().sids == [1]
        step.agree([5])
    assert isinstance(rank.answer(ClearKvCache(epoch=1, seq=4, model_id="m")), KvCacheCleared)
    assert isinstance(rank.answer(UnloadModel(epoch=1, seq=5, model_id="m")), Unloaded)
    assert kind(rank.answer(command)) == "model_not_loaded"


def test_a_refusal_is_logged_with_the_requests_that_run(folder: Path) -> None:
    """A command names the requests of the sequences that begin; one that has ended or left is not named any more."""
    rank = RankWorker(0, 1, "cpu")
    rank.answer(load(folder))
    begin = BatchChange(
        rows=[StepRow(sid, [1, 2, 3], 0, True) for sid in (1, 2, 3)], requests={1: "first", 2: "second", 3: "third"}
    )
    change = BatchChange(left=[1], kept=[3], rows=[StepRow(9, [1], 5, True)])
    with rank.step(GenerateStep(epoch=1, seq=3, model_id="m", change=begin)) as step:
        step.forward()
        step.agree([5, 5, 5])
    with capture_logs() as lines:
        assert kind(rank.answer(GenerateStep(epoch=1, seq=4, model_id="m", change=change))) == "forward_failed"
    [line] = [line for line in lines if line.get("action") == "refuse_command" and line["log_level"] == "error"]
    assert line["requests"] == ["second"]
    rank.leave()
    assert rank.requests == []


def test_a_second_load_is_already_loaded_but_a_new_epoch_keeps_the_weights(folder: Path) -> None:
    """One load per epoch; after a recovery the same command is answered at once."""
    rank = RankWorker(0, 1, "cpu")
    rank.answer(load(folder))
    assert kind(rank.answer(load(folder))) == "already_loaded"
    rank.leave()
    assert isinstance(rank.answer(load(folder, epoch=2)), LoadDenseShardOk)
    rank.leave()
    other = rank.answer(load(folder, epoch=3, shares=[1]))
    assert kind(other) == "already_loaded" and "with the shares []" in str(other)


def test_a_load_that_fails_says_why(folder: Path) -> None:
    """A missing file and an unsupported quantisation are load_failed with the cause, and leave nothing behind."""
    rank = RankWorker(0, 1, "cpu")
    missing = rank.answer(load(folder, safetensors_paths=[str(folder / "gone.safetensors")]))
    assert isinstance(missing, ErrorReply) and missing.kind == "load_failed" and "gone.safetensors" in missing.message
    quant = rank.answer(load(folder, quant="int4"))
    assert (
        isinstance(quant, ErrorReply) and quant.kind == "load_failed" and "use one of int8, f16, q4_0" in quant.message
    )
    assert isinstance(rank.answer(load(folder)), LoadDenseShardOk)


def test_images_are_refused_by_a_text_model(folder: Path) -> None:
    """No image is ever dropped silently."""
    rank = RankWorker(0, 1, "cpu")
    rank.answer(load(folder))
    step = GenerateStepWithImages(
        epoch=1, seq=3, model_id="m", change=BatchChange(), images=[StepImage(1, 0, 1, 8, 8, "0")], chunk_size=8
    )
    assert kind(rank.answer(step)) == "unsupported_arch"


@pytest.mark.parametrize(
    ("cause", "traced"), [(CollectiveFailed("rank 0 has died"), False), (ValueError("a defect"), True)]
)
def test_another_rank_s_end_is_one_line(monkeypatch: pytest.MonkeyPatch, cause: Exception, traced: bool) -> None:
    """A refusal has its traceback in the log, unless all there is to tell is that a peer is gone."""

    def fails(command: Ping) -> Pong:
        raise RankError(1, "forward_failed", str(cause)) from cause

    rank = RankWorker(1, 2, "cpu")
    monkeypatch.setitem(rank._handlers, Ping, fails)
    with capture_logs() as logs:
        assert kind(rank.answer(Ping(epoch=1, seq=1))) == "forward_failed"
    [line] = [line for line in logs if line["event"] == "refused a command"]
    assert line["error"] == str(cause) and bool(line["exc_info"]) is traced


def test_a_sanity_check_without_the_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their end is answered like any refusal; it is not this rank's own failure."""

    class Alone:
        rank, world_size, count = 1, 2, 0

        def all_reduce(self, tensor: object) -> object:
            raise CollectiveFailed("rank 0 has died")

    rank = RankWorker(1, 2, "cpu")
    monkeypatch.setattr(rank, "_collective", Alone())
    reply = rank.answer(NcclSanityCheck(epoch=1, seq=1))
    assert isinstance(reply, ErrorReply) and reply.kind == "nccl_init_failed" and "rank 0 has died" in reply.message


def test_replies_travel_as_tagged_json() -> None:
    """A reply is one JSON object with its op, and comes back as what it was."""
    reply = RankWorker(0, 1, "cpu").answer(ShutdownRank(epoch=1, seq=9))
    assert b'"op":"bye"' in encode(reply)
    decoded: AnyReply = decode_reply(encode(reply))
    assert decoded == reply
