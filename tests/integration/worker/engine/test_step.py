"""Refused steps leave the state untouched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from control.commands import Prefix
from control.errors import RankError
from tests.integration.worker.engine.stepping import command as step
from tests.integration.worker.engine.stepping import rows, run
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.slabs import SlabStore
from worker.models.loading import load


def begun(sid: int, donor: int, count: int, tokens: list[int], offset: int | None = None) -> dict[str, Any]:
    """Fields of a sampled row that goes on after a prefix."""
    return rows((sid, tokens, count if offset is None else offset)) | {"prefixes": [Prefix(sid, donor, count)]}


@pytest.fixture
def engine(checkpoint: Callable[[str], Path]) -> Engine:
    """An engine with room for 24 tokens whose sequence 1 has fed 3 tokens and sampled one."""
    model = load(checkpoint("llama"), collective=Solo())
    engine = Engine(model, SlabStore(model.cache_layout, 24), Solo())
    run(engine, step(1, **rows((1, [1, 2, 3], 0))))
    return engine


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        (rows((1, [4], 2)), "forward_failed", "sequence 1 has 3 cached tokens, but its row says offset 2"),
        (rows((9, [4], 5)), "forward_failed", "sequence 9 is unknown, so it must start at offset 0, not 5"),
        (rows((1, [4], 3)) | {"left": [1]}, "forward_failed", "sequence 1 is unknown"),
        (rows((9, [], 0)), "bad_request", "sequence 9 has a row without tokens"),
        (rows((9, [131], 0)), "bad_request", "token 131; the vocabulary has 131"),
        (rows((9, [5, -1], 0)), "bad_request", "token -1"),
        (rows((9, [5], 0), (9, [6], 1)), "bad_request", "two rows"),
        ({"paused": [9]}, "bad_request", "sequence 9 can't be paused: it is not known here"),
        (rows((1, [5], 3)) | {"paused": [1]}, "bad_request", "has a row in the same step"),
        (rows((9, [5] * 21, 0)), "forward_failed", "needs 25 cached tokens, but there is room for 24"),
        ({"kept": [9]}, "bad_request", "sequence 9 can't be kept: it is not known here"),
        (rows((1, [5], 3)) | {"kept": [1]}, "bad_request", "can't be kept: it has a row in the same step"),
        (begun(9, 1, 2, [5], offset=1), "forward_failed", "has 2 cached tokens, but its row says offset 1"),
        (begun(9, 1, 4, [5]), "bad_request", "4 tokens of sequence 1: that has 3 cached"),
        (begun(9, 8, 1, [5]), "bad_request", "of sequence 8: that has 0 cached"),
        (begun(9, 1, 0, [5]), "bad_request", "begin with 0 tokens"),
        ({"prefixes": [Prefix(9, 1, 2)]}, "bad_request", "must join with one row"),
        (begun(1, 1, 2, [5]), "bad_request", "has 3 cached tokens already"),
        (begun(9, 1, 3, [5] * 18), "forward_failed", "needs 25 cached tokens"),
    ],
)
def test_a_command_that_does_not_fit(engine: Engine, fields: dict[str, Any], kind: str, message: str) -> None:
    """A refused command names the sequence and changes nothing: the next step goes on where the last one ended."""
    with pytest.raises(RankError, match=message) as caught:
        run(engine, step(2, **fields))
    assert caught.value.kind == kind
    assert engine.store.length(1) == 3
    assert run(engine, step(2)).sids == [1]


def test_room_is_counted_after_those_who_leave(engine: Engine) -> None:
    """A step may fill the memory that its own leavers give back."""
    result = run(engine, step(2, left=[1], **rows((9, [5] * 24, 0))))
    assert result.sids == [9]
    assert engine.store.used_tokens == 24


def test_rows_are_in_the_promised_order(engine: Engine) -> None:
    """Continuing sequences come first by ascending sid, then the command's rows; a pause keeps its token for later."""
    run(engine, step(2, **rows((30, [1, 2], 0), (7, [1, 2], 0))))
    assert run(engine, step(3, **rows((4, [9], 0)))).sids == [1, 7, 30, 4]
    assert run(engine, step(4, paused=[7, 4])).sids == [1, 30]
    assert run(engine, step(5)).sids == [1, 4, 7, 30]


def test_a_pause_changes_no_token(engine: Engine) -> None:
    """A sequence that sat out some steps answers as if it had not."""
    run(engine, step(2, paused=[1], **rows((2, [1, 2, 3], 0))))
    tokens: dict[int, list[int]] = {1: [], 2: []}
    for seq, paused in enumerate([[], [2], [2], [1], [], [1]], start=3):
        result = run(engine, step(seq, paused=paused))
        for sid, token in zip(result.sids, result.tokens, strict=True):
            tokens[sid].append(token)
    assert tokens[1] == tokens[2]


def test_a_kept_sequence_rests(engine: Engine) -> None:
    """It feeds nothing more, holds its memory, and others begin with it until it leaves."""
    run(engine, step(2, kept=[1], **rows((2, [1, 2], 0))))
    assert run(engine, step(3)).sids == [2]
    assert engine.store.length(1) == 3
    run(engine, step(4, **begun(3, 1, 2, [9])))
    assert (engine.store.length(1), engine.store.length(3)) == (3, 3)
    run(engine, step(5, left=[1, 2, 3]))
    assert engine.store.used_tokens == 0


def test_room_is_counted_with_a_prefix(engine: Engine) -> None:
    """A copy needs room beside its donor; a donor that leaves gives its own, to the last token."""
    with pytest.raises(RankError, match="needs 25 cached tokens"):
        run(engine, step(2, paused=[1], **begun(9, 1, 3, [5] * 19)))
    assert run(engine, step(2, left=[1], **begun(9, 1, 3, [5] * 21))).sids == [9]
    assert engine.store.used_tokens == 24


def test_a_donor_that_leaves_serves_all(engine: Engine) -> None:
    """Several sequences may begin with one that leaves in the same step: the last one gets its memory."""
    fields = rows((7, [4, 5], 3), (8, [4, 5], 3)) | {"prefixes": [Prefix(7, 1, 3), Prefix(8, 1, 3)]}
    first, second = run(engine, step(2, left=[1], **fields)).tokens
    assert first == second and engine.store.length(1) is None


def test_a_cache_that_cannot_be_cut(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that can't give a beginning away refuses the command instead of computing something else."""
    monkeypatch.setattr(engine.store, "supports_prefix_sharing", False)
    with pytest.raises(RankError, match="this model's cache can't be cut"):
        run(engine, step(2, **begun(9, 1, 2, [5])))


def test_a_step_with_prefixes_can_be_run_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed forward the beginnings that were handed over are there, and the same command goes through."""
    command = step(2, left=[1], **begun(9, 1, 3, [5]))
    with monkeypatch.context() as patch:

        def broken(*_: Any) -> Tensor:
            raise RuntimeError("out of memory")

        patch.setattr(engine.model, "forward", broken)
        with pytest.raises(RankError, match="out of memory"):
            run(engine, command)
    assert run(engine, command).sids == [9]


def test_a_failed_forward_changes_no_length(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that raises is one rank error with the rows in it, and the same step can be run again."""
    with monkeypatch.context() as patch:

        def broken(*_: Any) -> Tensor:
            raise RuntimeError("out of memory")

        patch.setattr(engine.model, "forward", broken)
        with pytest.raises(RankError, match=r"RuntimeError: out of memory \(rows 1: 1 at 3\)"):
            run(engine, step(2))
    assert engine.store.length(1) == 3
    assert run(engine, step(2)).sids == [1]


def test_a_broken_broadcast_is_a_rank_error(engine: Engine) -> None:
    """A group that breaks in the broadcast fails the step like one that breaks in the forward, with its cause."""

    class Broken(Solo):
        def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
            raise RuntimeError("connection closed by peer")

    engine.collective = Broken()
    with pytest.raises(RankError, match="could not be broadcast: RuntimeError: connection closed by peer") as caught:
        run(engine, step(2))
    assert caught.value.kind == "forward_failed"
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("sampler", [None, lambda *_: []])
def test_a_sampler_that_gives_nothing(engine: Engine, sampler: Any) -> None:
    """Rank 0 without a sampler, or with one that drops rows, is an error and no silent end."""
    with pytest.raises(RankError, match="sampler"):
        run(engine, step(2), sampler)
    assert run(engine, step(3)).sids == []


def test_checksum_covers_layout_and_tokens(engine: Engine) -> None:
    """Another seq, another row or another token gives another checksum."""
    seen = {run(engine, step(2), lambda *_: [5]).checksum}
    engine.clear()
    for seq, prompt, token in [(1, [1, 2], 5), (2, [1, 2], 5), (2, [1, 2, 3], 5), (2, [1, 2], 6)]:
        engine.clear()
        seen.add(run(engine, step(seq, **rows((1, prompt, 0))), lambda *_, token=token: [token]).checksum)
    assert len(seen) == 5


def test_idle_step_runs_nothing(engine: Engine) -> None:
    """A step without a row takes no forward and no collective, and still has a checksum."""
    engine.clear()
    result = run(engine, step(2))
    assert (result.sids, result.tokens) == ([], [])
    assert result.checksum != run(engine, step(3)).checksum


def test_stale_values_never_reach_a_neighbour(engine: Engine) -> None:
    """A slab whose sequence went NaN is clean for the next one, and its padded neighbours stay clean meanwhile."""
    run(engine, step(2, **rows((2, [7] * 9, 0))))
    pool = next(iter(engine.store._pools.values()))[0]
    for memory in pool.memories:
        memory[:, :, 1, :, :9] = float("nan")

    def watching(logits: Tensor, sids: list[int]) -> list[int]:
        healthy = {sid: not row.isnan().any().item() for sid, row in zip(sids, logits, strict=True)}
        assert healthy == {sid: sid != 2 for sid in sids}
        return torch.zeros(len(sids), dtype=torch.int64).tolist()

    run(engine, step(3), watching)
    run(engine, step(4, left=[2], **rows((3, [1], 0))), watching)
    run(engine, step(5), watching)
