"""Guessed rows change no token: right ones stay, wrong ones leave no trace, and every rank goes on from the same
token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from control.commands import BatchChange, GenerateStep, StepRow
from control.errors import RankError
from tests.integration.worker.engine.ranks import Outcome, RankGroup, play
from tests.integration.worker.engine.stepping import command
from worker.collective import Solo
from worker.engine.step import REJECTED, Engine
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.native.library import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")

Checkpoint = Callable[[str], Path]
PROMPT = [number * 7 % 97 + 3 for number in range(40)]
NEW = 24


def engine(folder: Path, dtype: str = "float32") -> Engine:
    model = load(folder, collective=Solo(), dtype=dtype)
    return Engine(model, SlabStore(model.cache_layout, 4096), Solo())


def steps(*changes: BatchChange) -> list[GenerateStep]:
    return [GenerateStep(epoch=1, seq=seq, model_id="tiny", change=change) for seq, change in enumerate(changes, 1)]


def one_by_one() -> list[GenerateStep]:
    """The prompt, and then a token a step."""
    prompt = BatchChange(rows=[StepRow(1, PROMPT, 0, True)])
    return steps(prompt, *[BatchChange() for _ in range(NEW - 1)])


def guessed(tokens: list[int]) -> list[GenerateStep]:
    """The same, with right and wrong guesses of every length, and steps without any; another sequence beside it."""
    changes, at = [BatchChange(rows=[StepRow(1, PROMPT, 0, True), StepRow(2, PROMPT[:5], 0, True)])], 1
    for right, wrong in [(3, 0), (0, 2), (2, 3), (0, 0), (0, 1), (4, 1), (1, 0)]:
        guesses = tokens[at : at + right] + [(tokens[at + right + index] + 1) % 97 for index in range(wrong)]
        row = StepRow(1, [tokens[at - 1], *guesses], len(PROMPT) + at - 1, True, None, len(guesses))
        changes.append(BatchChange(rows=[row] if guesses else []))
        at += right + 1
    return steps(*changes, *[BatchChange() for _ in range(NEW - at)])


def kept(outcome: Outcome) -> list[int]:
    return [token for token in outcome.tokens[1] if token != REJECTED]


@pytest.mark.parametrize("family", ["gemma3_text", "granitemoehybrid", "lfm2", "lfm3", "qwen3_5_text", "qwen3_next"])
def test_guesses_leave_the_bits_as_they_are(family: str, checkpoint: Checkpoint) -> None:
    """Tokens, logits and the length of the cache are those of a run without guesses."""
    running = engine(checkpoint(family))
    expected = play(running, one_by_one())
    running.clear()
    tokens = play(running, guessed(expected.tokens[1]))
    assert kept(tokens) == expected.tokens[1] and REJECTED in tokens.tokens[1]
    logits = [row for row, token in zip(tokens.logits[1], tokens.tokens[1], strict=True) if token != REJECTED]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(logits, expected.logits[1], strict=True))
    assert running.store.length(1) == len(PROMPT) + NEW - 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", ["granitemoehybrid", "qwen3", "qwen3_5_text"])
def test_two_ranks_keep_the_same_guesses(family: str, checkpoint: Checkpoint, ranks: RankGroup) -> None:
    """Rank 1 forgets the guesses that rank 0 rejects."""
    ranks.form(2)
    ranks.ask("load", checkpoint(family), "float32", None)
    expected = ranks.ask("play", one_by_one())[0].tokens[1]
    ranks.form(2)
    first, second = ranks.ask("play", guessed(expected))
    assert kept(first) == expected == kept(second)
    assert first.checksums == second.checksums and first.left_over == second.left_over


@pytest.mark.parametrize(("tokens", "guesses", "sample"), [([5], 1, True), ([5, 6], -1, True), ([5, 6], 1, False)])
def test_a_row_of_guesses_alone_is_refused(
    tokens: list[int], guesses: int, sample: bool, checkpoint: Checkpoint
) -> None:
    """Nothing is changed by a row that no leader sends."""
    running = engine(checkpoint("qwen3"))
    row = StepRow(1, tokens, 0, sample, None, guesses)
    with pytest.raises(RankError, match="guesses follow a token"):
        running.step(command(1, rows=[row])).forward()
    assert running.store.length(1) is None


def test_a_forward_of_torch_refuses_guesses(checkpoint: Checkpoint) -> None:
    """Its bits depend on the batch, so a guess could change an answer."""
    running = engine(checkpoint("qwen3"), "float64")
    assert not running.verifies_guesses
    with pytest.raises(RankError, match="can't verify"):
        running.step(command(1, rows=[StepRow(1, [5, 6], 0, True, None, 1)])).forward()
