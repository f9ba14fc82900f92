"""Captured decode steps: buckets, filling, when none is used; with a graph that runs its work again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from control.commands import GenerateStep
from tests.integration.worker.engine import test_prefixes
from tests.integration.worker.engine.parity import assert_identical, generated, mixed
from tests.integration.worker.engine.ranks import play
from tests.integration.worker.engine.script import write
from tests.integration.worker.engine.stepping import command, rows, tensor_of
from worker.collective import Solo
from worker.engine.step import Engine
from worker.engine.torch.ahead import RunAhead
from worker.engine.torch.graphs import BUCKETS, DecodeGraphs, graphs_for
from worker.kv.torch import plain_attention
from worker.kv.torch.pages import PagedStore
from worker.models.loading import load
from worker.models.served import Row

Checkpoint = Callable[[str], Path]


class Counting(Solo):
    """A group of one whose collectives are counted like those of a larger one."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return tensor


class Recorder:
    """Captures by running the work once; a replay runs it again, over whatever the buffers hold then."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed: list[int] = []

    def __call__(self, work: Callable[[], None]) -> Recorder.Recorded:
        self.captured += 1
        work()
        return Recorder.Recorded(self, self.captured, work)

    class Recorded:
        def __init__(self, recorder: Recorder, number: int, work: Callable[[], None]) -> None:
            self._recorder, self._number, self._work = recorder, number, work

        def replay(self) -> None:
            self._recorder.replayed.append(self._number)
            self._work()


def engine_of(folder: Path, buckets: tuple[int, ...] = (1, 2, 4, 8), ahead: bool = False) -> tuple[Engine, Recorder]:
    model = load(folder, collective=Counting(), dtype="float64")
    engine = Engine(model, PagedStore(model.cache_layout, 4096, 512, plain_attention.attend, 16), Solo())
    recorder = Recorder()
    engine.graphs = DecodeGraphs(model, engine.store, recorder, buckets)  # type: ignore[arg-type]
    engine.ahead = RunAhead(engine.graphs) if ahead else None
    return engine, recorder


def row(sid: int, tokens: int = 1, sample: bool = True) -> Row:
    return Row(sid, [7] * tokens, 0, sample)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_captured_steps_equal_generate(family: str, checkpoint: Checkpoint) -> None:
    """Sequences that join, decode and leave have the tokens of transformers' generate, whatever bucket they are in."""
    folder = checkpoint(family)
    engine, recorder = engine_of(folder)
    engine.prepare()
    assert recorder.captured == 4
    outcome = play(engine, write(mixed()))
    assert_identical(folder, mixed(), outcome)
    assert len(recorder.replayed) > 5
    assert len(set(recorder.replayed)) > 1


def test_a_graph_takes_decode_batches_of_a_captured_size(checkpoint: Checkpoint) -> None:
    """One sampled token from each of at most as many sequences as the largest bucket has, once captured."""
    engine, _ = engine_of(checkpoint("llama"))
    graphs = engine.graphs
    assert graphs is not None and not graphs.takes([row(1)])
    engine.prepare()
    assert graphs.takes([row(1)]) and graphs.takes([row(sid) for sid in range(8)])
    assert not graphs.takes([row(sid) for sid in range(9)])
    assert not graphs.takes([row(1), row(2, tokens=2)])
    assert not graphs.takes([row(1, sample=False)])
    assert not graphs.takes([])
    assert [graphs.bucket(count) for count in (1, 2, 3, 8)] == [1, 2, 4, 8]


def test_rows_that_fill_up_leave_no_trace(checkpoint: Checkpoint) -> None:
    """They write no keys, whatever the blocks hold that their zeros could point to."""
    engine, _ = engine_of(checkpoint("llama"), buckets=(8,))
    store = engine.store
    assert isinstance(store, PagedStore) and engine.graphs is not None
    (memory,) = store._memories
    memory.fill_(3.0)
    engine.prepare()
    engine.graphs.run([row(1), row(2), row(3)])
    assert (memory != 3.0).any(-1).any(0).any(0).sum() == 3 * engine.model.cache_layout.layers[0].kv_heads


def test_replays_count_their_collectives(checkpoint: Checkpoint) -> None:
    """A replay counts what was captured, so that ranks can still be compared."""
    engine, _ = engine_of(checkpoint("llama"))
    collective = engine.model.collective
    capture = engine.graphs._capture  # type: ignore[union-attr]

    def with_a_collective(work: Callable[[], None]) -> Recorder.Recorded:
        collective.all_reduce(torch.ones(1))
        return capture(work)  # type: ignore[return-value]

    engine.graphs._capture = with_a_collective  # type: ignore[union-attr]
    engine.prepare()
    before = collective.count
    engine.graphs.run([row(1)])  # type: ignore[union-attr]
    assert collective.count == before + 1


def test_a_new_epoch_captures_again(checkpoint: Checkpoint) -> None:
    """Graphs are gone before the group is, are not used until captured again, and tables that moved void them."""
    engine, recorder = engine_of(checkpoint("llama"))
    graphs, store = engine.graphs, engine.store
    engine.prepare()
    engine.leave()
    assert graphs is not None and not graphs.takes([row(1)])
    engine.join(Solo())
    assert not graphs.takes([row(1)])
    engine.prepare()
    assert graphs.takes([row(1)]) and recorder.captured == 8
    assert isinstance(store, PagedStore)
    store.tables = store.tables.clone()
    assert not graphs.takes([row(1)])


def test_a_capture_that_fails_leaves_the_engine_working(
    checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its steps are launched by hand, and the log says why."""
    folder = checkpoint("llama")
    engine, _ = engine_of(folder)

    def refuse(work: Callable[[], None]) -> Recorder.Recorded:
        raise RuntimeError("operation not permitted when stream is capturing")

    engine.graphs._capture = refuse  # type: ignore[union-attr]
    engine.prepare()
    assert "not permitted when stream is capturing" in capsys.readouterr().out
    assert_identical(folder, mixed()[:2], play(engine, write(mixed()[:2])))


def test_no_graphs_without_a_gpu(checkpoint: Checkpoint) -> None:
    """On a CPU nothing is captured; the buckets reach the largest batch that is ever planned."""
    model = load(checkpoint("llama"), collective=Solo(), dtype="float32")
    store = PagedStore(model.cache_layout, 64, 512, plain_attention.attend)
    assert graphs_for(model, store) is None
    assert load(checkpoint("qwen3_moe"), collective=Solo()).waits_for_device and not model.waits_for_device
    assert BUCKETS[-1] == 256 and sorted(BUCKETS) == list(BUCKETS)


def play_ahead(engine: Engine, steps: list[GenerateStep]) -> tuple[dict[int, list[int]], int]:
    """Run `steps` greedily as on a GPU: the next step is launched before the host has the tokens. Returns the tokens,
    and the most cached tokens of any step."""
    sampled: dict[int, list[int]] = {}
    needed = 0
    for given in steps:
        with engine.step(given) as step:
            forward = step.forward()
            logits = tensor_of(forward.logits)
            tokens, kept = logits.argmax(dim=-1), logits.clone()
            step.run_ahead(tokens)
            assert torch.equal(logits, kept), "the next step wrote over logits that are still being read"
            step.agree(tokens.tolist())
        for sid, token in zip(forward.sids, tokens.tolist(), strict=True):
            sampled.setdefault(sid, []).append(token)
        needed = max(needed, engine.store.used_tokens)
    return sampled, needed


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("capacity", [16 * 22, 4096])
def test_running_ahead_changes_no_token(family: str, capacity: int, checkpoint: Checkpoint) -> None:
    """Sequences join, decode and leave while the next step is launched early, memory tight or not."""
    folder, jobs = checkpoint(family), mixed()
    engine, recorder = engine_of(folder, buckets=(1, 2, 4, 16), ahead=True)
    store = engine.store
    assert isinstance(store, PagedStore)
    store._blocks.grow(-1, (4096 - capacity) // 16)
    store.capacity_tokens = capacity
    engine.prepare()
    steps = write(jobs)
    sampled, needed = play_ahead(engine, steps)
    assert sampled == {job.sid: generated(folder, len(job.prompt)) for job in jobs}
    assert capacity > 1000 or needed >= capacity - 16
    assert len(recorder.replayed) > len(steps) / 2
    engine.clear()
    assert store.free_blocks * 16 == capacity


def test_running_ahead_of_shared_beginnings(checkpoint: Checkpoint) -> None:
    """Sequences that end, stay for others and are taken over, while the step after their last one was launched."""
    folder = checkpoint("llama")
    engine, _ = engine_of(folder, ahead=True)
    engine.prepare()
    jobs = test_prefixes.conversation(folder, 16)
    sampled, _ = play_ahead(engine, write(jobs))
    for job in jobs:
        assert sampled[job.sid] == test_prefixes.answered(folder, tuple(job.prompt)), f"sequence {job.sid}"


def test_what_was_launched_in_vain_leaves_no_trace(checkpoint: Checkpoint) -> None:
    """A sequence that is fed another token than the one that ran ahead has the logits of that other token."""
    folder = checkpoint("llama")
    engine, recorder = engine_of(folder, ahead=True)
    plain, _ = engine_of(folder)
    commands = command(1, **rows((1, [5, 6, 7], 0))), command(2, **rows((1, [9], 3)))
    results = []
    for one in (engine, plain):
        one.prepare()
        seen: list[torch.Tensor] = []
        for given in commands:
            with one.step(given) as step:
                seen.append(step.forward().logits.clone())
                step.run_ahead(torch.tensor([8]))
                step.agree([8])
        results.append(seen)
    assert len(recorder.replayed) == 3
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_nothing_runs_ahead_of_the_end_of_memory(checkpoint: Checkpoint) -> None:
    """Where the next step may not fit, or a sequence is at its longest, it is not launched."""
    engine, _ = engine_of(checkpoint("llama"), ahead=True)
    engine.prepare()
    assert engine.ahead is not None
    assert engine.ahead.following([Row(2, [7], 3, True), Row(1, [7], 510, True)]) == [
        Row(1, [0], 511, True),
        Row(2, [0], 4, True),
    ]
    assert engine.ahead.following([Row(1, [7], 511, True)]) == []
    assert engine.ahead.following([Row(1, [7], 3, False)]) == []
