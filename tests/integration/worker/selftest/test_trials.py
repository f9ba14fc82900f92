"""Wrong kernels are switched off by name; and models serve the plain way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from structlog.testing import capture_logs

from tests import models
from tests.integration.worker.engine.ranks import play
from tests.integration.worker.engine.script import Job, write
from tests.rooms import ROOT
from worker.collective import Solo, rendezvous
from worker.engine.step import Engine
from worker.engine.torch.graphs import DecodeGraphs, RefusedCapture
from worker.kv.slabs import SlabStore
from worker.kv.torch import plain_attention
from worker.kv.torch import stores as torch_stores
from worker.kv.torch.pages import PagedStore
from worker.models.loading import load
from worker.selftest import choice, records, runner, switches
from worker.selftest.__main__ import tried
from worker.selftest.records import Record, TrialResult
from worker.selftest.runner import TRIALS, TrialTask
from worker.selftest.shapes import Shapes, of_config
from worker.selftest.trial import TrialRequest

FAULTY = "tests.integration.worker.selftest.faulty"
SHAPES = Shapes(
    hidden=48, inner=40, heads=4, kv_heads=2, head_dim=16, dtype="float32", windows=(0, 9), softcap=5.0, sinks=True
)
KERNELS = [name for name in TRIALS if name.startswith("triton")]
Checkpoint = Callable[[str], Path]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kept = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "furrow" / "compiled"
    kept.mkdir(parents=True, exist_ok=True)
    (tmp_path / "furrow").mkdir()
    (tmp_path / "furrow" / "compiled").symlink_to(kept)  # verdicts are this test's, libraries are not compiled again
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(switches, "_off", {})
    yield


def here(kernel: str, place: str, shapes: Shapes = SHAPES) -> list[TrialResult]:
    """The results of a trial in this process."""
    return list(tried(kernel, place, TrialRequest(torch.device("cpu"), shapes, 20), False))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_that_work_are_ok(kernel: str, dtype: str) -> None:
    """The control: in Triton's interpreter nothing differs, with windows, caps and sinks."""
    pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel here")
    results = here(kernel, TRIALS[kernel], msgspec.structs.replace(SHAPES, dtype=dtype))
    assert results and {result.verdict for result in results} == {"ok"}, results


@pytest.mark.parametrize(
    ("kernel", "function", "verdict", "detail"),
    [
        ("triton.decode", "wrong_scale", "differs", "of the largest value"),
        ("triton.store", "wrong_place", "differs", "of the largest value"),
        ("triton.gate", "raising", "raised", "RuntimeError: out of resources: shared memory"),
        ("graphs", "refused_capture", "raised", "RuntimeError: operation not permitted when stream is capturing"),
        ("graphs", "stale_capture", "differs", "of the largest value"),
    ],
)
def test_what_is_wrong_is_found(kernel: str, function: str, verdict: str, detail: str) -> None:
    pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel here")
    found = here(kernel, f"{FAULTY}:{function}")[-1]
    assert (found.kernel, found.verdict) == (kernel, verdict)
    assert detail in found.detail


def test_a_fault_and_a_hang_end_their_process_alone() -> None:
    """The trials after them go on in another one."""
    pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel here")
    trials = {
        "triton.norm": f"{FAULTY}:killed",
        "collective.native": f"{FAULTY}:hanging_collective",
        "triton.gate": TRIALS["triton.gate"],
    }
    told: list[TrialResult] = []
    begun = time.monotonic()
    results = runner.run(TrialTask("cpu", SHAPES, 20, False, trials), told.append, within_s=8.0)
    assert time.monotonic() - begun < 50
    assert told == results
    by_name = {result.kernel: (result.verdict, result.detail) for result in results}  # the last of each
    assert by_name == {
        "triton.norm": ("faulted", "(SIGSEGV)"),
        "collective.native": ("timed out", "after 8 s"),
        "triton.gate": ("ok", ""),
    }


def test_a_process_that_can_t_start_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last words are the reason."""
    command = [sys.executable, "-c", "import sys; sys.exit('no such device')"]
    monkeypatch.setattr(runner, "python_command", lambda module: command)
    with pytest.raises(runner.NotTried, match="no such device"):
        runner.run(TrialTask("cpu", SHAPES, 20, False, {"cpp": TRIALS["cpp"]}))


def recorded(device: str, shapes: Shapes, names: tuple[str, ...], results: list[TrialResult]) -> None:
    records.write(Record(choice.subject_of(device, shapes, names), results))


def test_a_record_switches_off_by_name_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names kernel, reason and what is done instead; it is read in milliseconds, and a model of other shapes has its
    own."""
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "model_type": "llama"}
    shapes = of_config(config, "float32")
    recorded("cpu", shapes, choice.KERNELS["cpu"], [TrialResult("cpp", "", "float32", "differs", "by 3")])
    with capture_logs() as logs:
        choice.choose(config, "float32", "cpu", 1)
    assert switches.reason_off("cpp") == "cpp: differs by 3"
    [line] = logs
    assert (line["kernel"], line["reason"], line["log_level"]) == ("cpp", "differs by 3", "warning")
    assert line["instead"] == switches.PLAIN["cpp"] and "furrow selftest" in line["remedy"]
    with capture_logs() as logs:
        choice.choose(config | {"hidden_size": 32}, "float32", "cpu", 1)
    assert logs == [] and switches.reason_off("cpp") is None


def test_a_collective_that_hangs_is_replaced() -> None:
    """Ranks on a host offer the others in its place; without any they meet over sockets."""
    shapes = choice.collective_shapes("cpu")
    hung = TrialResult("collective.native", "", "float32", "timed out", "after 90 s")
    recorded("cpu", shapes, choice.COLLECTIVES["cpu"], [hung])
    before = rendezvous.card_of("cpu", True).ways
    choice.choose_collective("cpu")
    assert rendezvous.card_of("cpu", True).ways == [way for way in before if way != "native"]
    switches.switch_off(dict.fromkeys(choice.COLLECTIVES["cpu"], "timed out"))
    card = rendezvous.card_of("cpu", True)
    assert card.ways == [] and "switched off" in card.refusal
    switches.switch_off({"collective.nccl": "timed out"})
    assert rendezvous.card_of("cuda:0", True).ways == [rendezvous.HOST]


JOBS = [Job(1, list(range(11)), 8, 3), Job(2, list(range(40, 45)), 16, 3, start=1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make("gemma2", tmp_path_factory.mktemp("gemma2"))


def played(engine: Engine) -> Any:
    return play(engine, write(JOBS))


def test_the_model_serves_the_plain_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention kernels and fused modules off, and captures refused, its tokens are those of a CPU."""
    pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel here")
    from worker.kv.torch import paged_kernels as paged
    from worker.models.torch.kernels.modules import fuse

    plain = load(folder, collective=Solo(), dtype="float32")
    expected = played(Engine(plain, SlabStore(plain.cache_layout, 64), Solo()))
    switches.switch_off({"cpp": "differs"})  # so that its modules are transformers', as on a GPU
    model = load(folder, collective=Solo(), dtype="float32")
    assert torch_stores.attention_for(model.cache_layout) is paged.attend
    off = ("triton.decode", "triton.norm", "triton.gate", "triton.rotary", "graphs")
    switches.switch_off(dict.fromkeys(off, "differs by 2"))
    assert fuse(model._module) == 0
    attention = torch_stores.attention_for(model.cache_layout)
    assert attention is plain_attention.attend
    store = PagedStore(model.cache_layout, 128, 512, attention, 16)
    engine = Engine(model, store, Solo())
    engine.graphs = DecodeGraphs(model, store, RefusedCapture("graphs: differs by 2"), (1, 2, 4))
    engine.prepare()
    assert played(engine).tokens == expected.tokens


def test_a_capture_counts_only_on_all_ranks(folder: Path) -> None:
    """Where another rank could not capture, this one launches step by step too, or their collectives would differ."""

    class Two(Solo):
        """A group whose other rank votes as it is told."""

        other = 0

        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor + self.other

    class Again:
        def replay(self) -> None: ...

    model = load(folder, collective=Solo(), dtype="float64")
    store = PagedStore(model.cache_layout, 128, 512, plain_attention.attend, 16)
    graphs = DecodeGraphs(model, store, lambda work: Again(), (1, 2))
    model._link.collective = group = Two()
    group.world_size = 2
    graphs.prepare()
    assert not graphs._graphs
    group.other = 1
    graphs.prepare()
    assert len(graphs._graphs) == 2


def test_the_command_prints_a_table(folder: Path, tmp_path: Path) -> None:
    """On a CPU everything works; the verdicts are kept. A device that is absent is status 2."""
    command = [sys.executable, "-m", "ops.cli", "selftest"]
    ran = subprocess.run(
        [*command, "--device", "cpu", "--model", str(folder)], capture_output=True, text=True, timeout=50, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0].startswith("device: ") and "GB/s" in ran.stdout
    for name in ("cpp", "collective.native"):
        assert f"\n{name} " in ran.stdout
    assert "everything that is available here works" in ran.stdout
    assert len(list((tmp_path / "furrow" / "verdicts").glob("*.json"))) == 2
    if not torch.cuda.is_available():
        absent = subprocess.run(
            [*command, "--device", "cuda:0"], capture_output=True, text=True, timeout=50, check=False
        )
        assert absent.returncode == 2 and "cuda:0 is absent" in absent.stderr


def test_a_gpu_tries_once_and_reads_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first load of a model on a kind of device runs its trials and reports progress; others read the record."""
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "model_type": "llama"}
    asked: list[TrialTask] = []

    def run(task: TrialTask, tell: Callable[[TrialResult], None]) -> list[TrialResult]:
        asked.append(task)
        results = [TrialResult(name, "", task.shapes.dtype, "ok") for name in task.trials]
        results[0] = msgspec.structs.replace(results[0], verdict="faulted", detail="(SIGABRT)")
        for result in results:
            tell(result)
        return results

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(
        choice,
        "subject_of",
        lambda device, shapes, names: records.Circumstances("H100", {}, {"names": " ".join(names)}),
    )
    told: list[int] = []
    for _ in range(2):
        switches.switch_off({})
        choice.choose(config, "bfloat16", "cuda:0", 1, lambda: told.append(1))
        assert switches.reason_off("triton.norm") == "triton.norm: faulted (SIGABRT)"
        assert switches.reason_off("triton.gate") is None
    choice.choose_collective("cuda:0")
    assert [tuple(task.trials) for task in asked] == [choice.KERNELS["cuda"], choice.COLLECTIVES["cuda"]]
    assert asked[0].shapes.dtype == "bfloat16" and len(told) == len(choice.KERNELS["cuda"])
    assert switches.reason_off("collective.nccl") is not None


def test_trials_that_can_t_run_switch_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning says so, and the next load tries again."""

    def fail(task: TrialTask, tell: Callable[[TrialResult], None]) -> list[TrialResult]:
        raise runner.NotTried("the device is busy")

    monkeypatch.setattr(runner, "run", fail)
    monkeypatch.setattr(choice, "subject_of", lambda device, shapes, names: records.Circumstances("H100", {}, {}))
    with capture_logs() as logs:
        choice.choose_collective("cuda:0")
    assert logs[-1]["reason"] == "the device is busy" and logs[-1]["log_level"] == "warning"
    assert switches.reason_off("collective.nccl") is None
    assert records.read(records.Circumstances("H100", {}, {})) is None
