"""The report of a comparison: limits, table, JSON and goals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.bench.peers import limits
from ops.bench.peers.engine import Row
from ops.bench.peers.limits import Cost, Machine
from ops.bench.peers.report import Comparison, table
from ops.bench.peers.results import EngineResult, EngineResults, Goal, RunFigures, judged
from ops.bench.peers.runner import Plan

FARM, LLAMA, ABSENT = Row("furrow-farm", "f32"), Row("llama-server", "f32"), Row("transformers", "bf16")
COST = Cost(matrices=1000, head=400, cached=10)


def at(decode: float) -> RunFigures:
    return RunFigures(decode=decode, whole=decode / 2, ttft=100, gap_p50=1000 / decode, gap_p99=2000 / decode)


@pytest.fixture
def comparison() -> Comparison:
    results = EngineResults({row: EngineResult(row) for row in (FARM, LLAMA, ABSENT)})
    for row, rates in ((FARM, [10.0, 12.0, 50.0]), (LLAMA, [5.0, 6.0, 40.0])):
        one = results.rows[row]
        one.runs, one.ttft_ms = {1: [at(rate) for rate in rates]}, {512: [100.0, 300.0, 200.0]}
        one.first_token_s, one.memory_mib, one.equal = [3.0], [50.0], [1.0]
    results.rows[ABSENT].skipped = "it is not installed"
    plan = Plan((FARM, LLAMA, ABSENT), (1,), prompt=6, tokens=8, ttft=(512,), rounds=3, vocabulary=4096)
    machine = Machine({"sum": 80_000.0}, {"f32": 1e6})
    return Comparison("a machine", "tiny", "cpu", plan, COST, machine, results)


def test_the_cost_of_a_shape(tmp_path: Path) -> None:
    """Counted as the matrices of a Qwen3 checkpoint, embedding not read but as the head."""
    shape = {"hidden_size": 8, "num_hidden_layers": 3, "head_dim": 4, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "intermediate_size": 16, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    assert Cost.of(tmp_path) == Cost(matrices=3 * layer + 800, head=800, cached=3 * 2 * 4)


def test_a_step_is_bounded_by_reading_or_by_products() -> None:
    """One stream waits for memory, many for the multiplications; narrow weights are read sooner."""
    machine = Machine({"sum": 4000.0}, {"f32": 100_000.0})
    assert COST.decode_limit(machine, FARM, "cpu", 1, context=0) == pytest.approx(1)
    assert COST.decode_limit(machine, FARM, "cpu", 1, context=100) == pytest.approx(0.5)
    assert COST.decode_limit(machine, FARM, "cpu", 1000, context=0) == pytest.approx(50)
    assert COST.decode_limit(machine, Row("furrow-farm", "int8"), "cpu", 1, context=0) == pytest.approx(4)
    assert COST.first_token_limit(machine, FARM, 1000) == pytest.approx(2 * (600 * 1000 + 400) / 100_000)


def test_narrow_weights_may_use_every_product() -> None:
    """float32 can't be narrowed without loss, so only its own rate limits it."""
    machine = Machine({}, {"f32": 1.0, "bf16": 2.0, "int8": 3.0})
    assert [machine.operations(weights) for weights in ("f32", "bf16", "f16", "q8_0")] == [1, 2, 2, 3]


def test_an_engine_that_reads_faster_raises_the_limit(comparison: Comparison) -> None:
    """A share above the whole would mean that the limit was measured badly."""
    assert comparison.share(comparison.results.rows[FARM], 1) == pytest.approx(12 * 4400 / 80_000)
    comparison.limits.read["sum"] = 1000.0
    comparison.raise_limits()
    assert comparison.share(comparison.results.rows[FARM], 1) == pytest.approx(1)
    assert comparison.limits.bandwidth == pytest.approx(12 * 4400)
    fastest = 2 * (600 * 512 + 400) / 0.2
    assert comparison.limits.operations("f32") == pytest.approx(max(1e6, fastest))


def test_the_machine_is_measured_and_the_best_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel has a rate, and a later slower call lowers none."""
    monkeypatch.setitem(limits.READ_BYTES, "cpu", 2**20)
    monkeypatch.setitem(limits.SIDE, "cpu", 64)
    machine = Machine({"sum": 1e15}, {"f32": 1e18})
    machine.measure("cpu", threads=1)
    assert machine.read["sum"] == 1e15
    assert machine.multiply["f32"] == 1e18
    assert all(value > 0 for value in [*machine.read.values(), *machine.multiply.values()])
    assert len(machine.read) >= 4


def test_the_table_tells_everything(comparison: Comparison) -> None:
    """Medians, the limit and the share, the ratio within rounds, and why a row is missing."""
    lines = table(comparison).splitlines()
    farm, llama = (next(line.split() for line in lines if line.split()[:1] == [str(row)]) for row in (FARM, LLAMA))
    assert farm[1:5] == ["12.0", "18.2", "66", "%"]
    assert (farm[-1], llama[1], llama[-1]) == ("1.00", "6.0", "2.00")
    assert "  skipped transformers:bf16: it is not installed" in lines
    assert any("200 (" in line and "100 %" in line for line in lines)


def test_json_has_rounds_medians_and_limits(comparison: Comparison) -> None:
    """All that the table tells, and each round's figures."""
    written = json.loads(json.dumps(comparison.as_json()))
    assert [row["row"] for row in written["rows"]] == [str(row) for row in (FARM, LLAMA, ABSENT)]
    assert written["rows"][0]["medians"]["1"]["decode"] == 12
    assert len(written["rows"][0]["runs"]["1"]) == 3
    assert written["limits"]["read"] == {"sum": 80_000.0}


def test_goals_are_judged_by_the_first_measured_engine(comparison: Comparison) -> None:
    """By the first engine that was measured; what was not is named."""
    goals = [
        Goal("f32", 1, 2.5, ("llama.cpp:f32", "llama-server:f32")),
        Goal("f32", 1, 0.5),
        Goal("f32", 1, 0.9, ("llama-server:f32",), prompt=512),
        Goal("int8", 1, 1.0, ("llama-server:f32",)),
        Goal("f32", 8, 1.0, ("llama-server:f32",)),
        Goal("f32", 1, 1.6, ("llama-server:f32",), memory=True),
        Goal("f32", 1, 1.4, ("llama-server:f32",), memory=True),
        Goal("f32", 1, 1.0, ("llama-server:f32",), prompt=512, start=True),
    ]
    comparison.results.rows[FARM].memory_mib = [75.0]
    comparison.results.rows[LLAMA].first_token_s = [2.0]
    found, lacking = judged(goals, comparison.results, comparison.share)
    assert [figure.holds for figure in found] == [False, True, False, True, False, False]
    assert found[-1].measured == pytest.approx(3.1 / 2.1) and "start and first token of 512" in found[-1].name
    assert found[0].measured == pytest.approx(2)
    assert lacking == ["furrow-farm or furrow-loop:int8", "furrow-farm:f32 with 8 streams"]
