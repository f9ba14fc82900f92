"""A rank group stays equal through recoveries; and a failing sampler, and on each rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import Job, write
from tests.integration.worker.engine.stepping import command, rows
from worker.collective import Solo
from worker.engine.step import NO_TOKEN, Engine
from worker.kv.slabs import SlabStore
from worker.models.loading import load

Checkpoint = Callable[[str], Path]

JOBS = [Job(1, list(range(20)), 8, 10), Job(2, list(range(40, 45)), 8, 10, start=3)]


@pytest.mark.timeout(60)
def test_a_new_group_keeps_the_weights(checkpoint: Checkpoint, ranks: RankGroup) -> None:
    """Cut off in the middle of a run, ranks join another group and answer as before, without loading again."""
    ranks.form(2)
    ranks.ask("load", checkpoint("qwen3"), "float64")
    steps = write(JOBS)
    before = ranks.ask("play", steps)
    interrupted = ranks.ask("play", steps[:7])
    assert interrupted[0].left_over > 0
    ranks.form(2)
    after = ranks.ask("play", steps)
    assert [outcome.tokens for outcome in after] == [outcome.tokens for outcome in before]
    assert [outcome.checksums for outcome in after] == [outcome.checksums for outcome in before]


@pytest.mark.timeout(60)
def test_a_failing_sampler_strands_nobody(checkpoint: Checkpoint, ranks: RankGroup) -> None:
    """Where rank 0 can't sample, its peer leaves the step with no token after the same number of collectives."""
    ranks.form(2)
    ranks.ask("load", checkpoint("qwen3"), "float64")
    (first, count), (second, other_count) = ranks.ask("sample_fails", command(1, **rows((1, [5, 6, 7], 0))))
    assert first == "no such grammar"
    assert second == str([NO_TOKEN])
    assert count == other_count
    # The sequence is cached on both and goes on with a row of its own.
    outcomes = ranks.ask("play", [command(2, **rows((1, [8], 3)))])
    assert outcomes[0].tokens == outcomes[1].tokens
    assert len(outcomes[0].tokens[1]) == 1


@pytest.mark.timeout(60)
def test_a_command_may_last_several_forwards(checkpoint: Checkpoint, ranks: RankGroup) -> None:
    """Rank 0 says after each whether there is another: the tokens are those of as many commands, on every rank."""
    ranks.form(2)
    ranks.ask("load", checkpoint("qwen3"), "float64")
    prompts = rows((1, [5, 6, 7], 0), (2, [8], 0))
    alone = ranks.ask("play", [command(1, **prompts), *map(command, range(2, 6))])
    ranks.ask("play", [command(6, left=[1, 2])])
    first, second = ranks.ask("repeat", command(7, repeat=True, **prompts), 5)
    assert first.tokens == alone[0].tokens
    assert first.checksums == second.checksums and first.collectives == second.collectives == alone[0].collectives
    after = ranks.ask("play", [command(8)])
    assert after[0].tokens == after[1].tokens and after[0].tokens.keys() == {1, 2}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("qwen3_moe", "float64")])
def test_each_rank_holds_its_share(family: str, dtype: str, checkpoint: Checkpoint, ranks: RankGroup) -> None:
    """Two ranks hold half of the weights each, but for norms, routers and the padding of the vocabulary. Packed experts
    are padded to whole panels, which shows where they are as narrow as here."""
    folder = checkpoint(family)
    whole = load(folder, collective=Solo(), dtype=dtype).weight_bytes
    ranks.form(2)
    ranks.ask("load", folder, dtype)
    shares = [outcome.weight_bytes for outcome in ranks.ask("play", [])]
    assert sum(shares) >= whole
    assert max(shares) < whole / 2 * 1.06


def test_a_slab_that_is_outgrown(checkpoint: Checkpoint) -> None:
    """Sequences that move to longer slabs while others stay answer as they do alone."""
    model = load(checkpoint("mistral"), collective=Solo(), dtype="float64")
    engine = Engine(model, SlabStore(model.cache_layout, 4096), Solo())
    jobs = [
        Job(sid, [(sid * 7 + place) % 128 for place in range(length)], 64, 12, start=sid)
        for sid, length in enumerate((250, 30, 255, 300, 249, 2))
    ]
    together = play(engine, write(jobs)).tokens
    for job in jobs:
        assert play(engine, write([Job(job.sid, job.prompt, 512, 12)])).tokens[job.sid] == together[job.sid]
    assert engine.store.used_tokens == 0


@pytest.mark.timeout(60)
def test_address_space_for_one_slab_is_enough(checkpoint: Checkpoint, ranks: RankGroup) -> None:
    """Where the kernel maps one slab and not the two to four that a pool begins with, a pool has fewer: the tokens are
    the undisturbed ones. The control has no such pools, and its step fails."""
    ranks.form(2)
    ranks.ask("load", checkpoint("llama"), "float64")
    jobs = [Job(sid, [(sid * 7 + place) % 128 for place in range(1100)], 400, 4, start=sid) for sid in (1, 2)]
    before = ranks.ask("play", write(jobs))
    slab = ranks.ask("slab_bytes", 2048)[0]
    try:
        ranks.ask("limit_mappings", slab)
        after = ranks.ask("play", write(jobs))
        ranks.ask("limit_mappings", slab - 1)
        with pytest.raises(AssertionError, match="Cannot allocate memory"):
            ranks.ask("play", write(jobs))
    finally:
        ranks.ask("limit_mappings", None)
    assert [outcome.tokens for outcome in after] == [outcome.tokens for outcome in before]
    assert [outcome.checksums for outcome in after] == [outcome.checksums for outcome in before]
