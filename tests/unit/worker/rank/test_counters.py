"""Counters in shared memory outlive a rank: they are read by another process, and become Prometheus metrics."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from worker.agent.metrics import RankCollector
from worker.rank import counters as counters_module
from worker.rank import series
from worker.rank.counters import (
    FOLDER_KEY,
    FOLDER_VARIABLE,
    Counters,
    Labels,
    counters_of,
    read_counters,
    share_folder,
)

LABELS = Labels("tiny", "r0", 0)
_A_TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
_REQUEST = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
_FIRST = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0"
VLLM_BUCKETS = {
    "vllm:time_to_first_token_seconds": _FIRST,
    "vllm:inter_token_latency_seconds": _A_TOKEN,
    "vllm:request_time_per_output_token_seconds": _A_TOKEN,
    "vllm:e2e_request_latency_seconds": _REQUEST,
    "vllm:request_queue_time_seconds": _REQUEST,
    "vllm:request_prefill_time_seconds": _REQUEST,
    "vllm:request_decode_time_seconds": _REQUEST,
    "vllm:request_inference_time_seconds": _REQUEST,
}
VLLM_SERIES = {
    *VLLM_BUCKETS,
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def exposed(folder: Path, places: Callable[[], list[tuple[str, str]]]) -> str:
    registry = CollectorRegistry()
    registry.register(RankCollector(folder, places))
    return generate_latest(registry).decode()


def samples(text: str) -> dict[str, float]:
    """Each sample of the text by its name and the label that tells it from others of the series."""
    return {
        " ".join([sample.name, *(sample.labels[one] for one in ("finished_reason", "le") if one in sample.labels)]): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_and_buckets_are_vllm_s() -> None:
    """Dashboards and scaling rules for vLLM find every series that they ask for."""
    assert {one.name for one in series.ALL if one.name.startswith("vllm:")} == VLLM_SERIES
    for one in series.ALL:
        if one.name in VLLM_BUCKETS:
            assert " ".join(map(str, one.bounds)) == VLLM_BUCKETS[one.name], one.name
    assert series.REQUEST_PROMPT.bounds[:7] == (1, 2, 5, 10, 20, 50, 100)
    assert series.SUCCESS.label == "finished_reason" and series.SUCCESS.values == ("stop", "length", "abort", "error")


def test_no_two_series_share_a_cell() -> None:
    """Each place belongs to one series."""
    taken = [cell for one in series.ALL for cell in range(one.start, one.start + one.cells)]
    assert sorted(taken) == list(range(1, series.CELLS))


def test_a_killed_rank_s_counts_go_on(folder: Path) -> None:
    """The next process of the rank adds to what the killed one has counted."""
    script = (
        "import os, signal; from worker.rank import series;"
        "from worker.rank.counters import Labels, counters_of;"
        "counters_of(Labels('tiny', 'r0', 0)).add(series.GENERATION_TOKENS, 7);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script], env=dict(os.environ)).returncode == -9
    counters = counters_of(LABELS)
    counters.add(series.GENERATION_TOKENS, 5)
    [file] = folder.glob("*.counters")
    labels, read = read_counters(file)
    assert (labels, read.read(series.GENERATION_TOKENS), read.pid) == (LABELS, [12.0], os.getpid())


def test_memory_that_can_t_be_read_is_replaced(folder: Path) -> None:
    """A file that is cut, and one of another layout: the rank counts anew, and the agent shows nothing of it before."""
    counters_of(LABELS).add(series.STEPS)
    [file] = folder.glob("*.counters")
    for damaged in (file.read_bytes()[:100], file.read_bytes().replace(series.LAYOUT.encode(), b"0" * 16)):
        file.write_bytes(damaged)
        with pytest.raises(ValueError):
            read_counters(file)
        assert "furrow_rank_commands_total{" not in exposed(folder, lambda: [("tiny", "r0")])
        counters_of(LABELS).add(series.STEPS)
        assert read_counters(file)[1].read(series.STEPS) == [1.0]


def test_a_rank_without_a_folder_counts_for_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable, or a folder that is gone: counters are never a reason not to serve."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    counters_of(LABELS).add(series.STEPS)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "gone"))
    counters_of(LABELS).add(series.STEPS)


def test_a_histogram_is_the_library_s(folder: Path) -> None:
    """The buckets, count and sum of the same observations are those of prometheus_client's own histogram."""
    registry, counters, rng = CollectorRegistry(), counters_of(LABELS), random.Random(5)
    name = series.TO_FIRST_TOKEN.name
    library = Histogram(name, "x", buckets=series.TO_FIRST_TOKEN.bounds, registry=registry)
    for value in [*series.TO_FIRST_TOKEN.bounds, *(rng.expovariate(1.0) for _ in range(200)), 9_999.0]:
        library.observe(value)
        counters.observe(series.TO_FIRST_TOKEN, value)
    ours, theirs = samples(exposed(folder, list)), samples(generate_latest(registry).decode())
    expected = {key: value for key, value in theirs.items() if key.startswith(name) and "_created" not in key}
    assert len(expected) == len(series.TO_FIRST_TOKEN.bounds) + 3
    assert {key: ours[key] for key in expected} == pytest.approx(expected)


def test_gauges_end_with_their_process_and_counters_do_not(folder: Path) -> None:
    """A dead leader runs no requests; its tokens were generated all the same."""
    counters = counters_of(LABELS)
    counters.set(series.RUNNING, 3)
    counters.add(series.GENERATION_TOKENS, 9)
    sample_list = samples(exposed(folder, lambda: [("tiny", "r0")]))
    assert (sample_list["vllm:num_requests_running"], sample_list["vllm:generation_tokens_total"]) == (3, 9)
    counters.begin(2**22 + 1)  # above the greatest pid
    sample_list = samples(exposed(folder, lambda: [("tiny", "r0")]))
    assert "vllm:num_requests_running" not in sample_list and sample_list["vllm:generation_tokens_total"] == 9
    assert samples(exposed(folder, list)) == {} and not list(folder.glob("*.counters"))


def test_a_follower_rank_shows_no_requests(folder: Path) -> None:
    """Requests are counted by leaders alone; commands by every rank."""
    for rank in (0, 1):
        counters_of(Labels("tiny", "r0", rank)).add(series.STEPS, rank + 1)
    text = exposed(folder, lambda: [("tiny", "r0")])
    assert text.count("vllm:generation_tokens_total{") == 1
    assert 'furrow_rank_commands_total{engine="r0",model_name="tiny",rank="1"} 2.0' in text


def test_the_engine_of_a_replica_is_shown_and_counts_begin_anew_with_another(folder: Path) -> None:
    counters_of(Labels("tiny", "r0", 0)).add(series.GENERATION_TOKENS, 5)
    assert 'furrow_replica_served_by{engine="r0",model_name="tiny",served_by="furrow"} 1.0' in exposed(
        folder, lambda: [("tiny", "r0")]
    )
    counters_of(Labels("tiny", "r0", 0, served_by="vllm")).add(series.GENERATION_TOKENS, 2)
    text = exposed(folder, lambda: [("tiny", "r0")])
    assert text.count("furrow_replica_served_by{") == 1 and 'served_by="vllm"' in text
    assert 'vllm:generation_tokens_total{engine="r0",model_name="tiny"} 2.0' in text


@pytest.mark.parametrize("name", ['a"b', "new\nline", "back\\slash", "模型 ü", '{x="1"} 5', "</script>", "x" * 200])
def test_names_of_models_are_only_labels(folder: Path, name: str) -> None:
    """Any name is read back as it was, and adds no line."""
    counters_of(Labels(name, "r0", 0)).add(series.GENERATION_TOKENS, 2)
    families = text_string_to_metric_families(exposed(folder, lambda: [(name, "r0")]))
    named = [
        sample for family in families for sample in family.samples if sample.name == "vllm:generation_tokens_total"
    ]
    assert [(sample.labels["model_name"], sample.value) for sample in named] == [(name, 2)]


def test_times_count_as_often_as_said() -> None:
    """Tokens of one emission share their time."""
    counters = Counters()
    counters.observe(series.BETWEEN_TOKENS, 0.02, times=4)
    cells = counters.read(series.BETWEEN_TOKENS)
    assert cells[:3] == [0, 4, 0] and cells[-1] == pytest.approx(0.08)


def test_only_folders_that_nobody_uses_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ended supervisors, of one whose pid another process has, and what an agent of this supervisor left that did
    not start; not those of a live supervisor, and none that a process uses whose pid is not seen here."""
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    monkeypatch.setattr(counters_module, "SHARED_MEMORY", tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    def made(pid: int, name: str, age_s: float = 0.0) -> Path:
        path = tmp_path / f"furrow-counters-{pid}-{name}"
        path.mkdir()
        (path / "x.counters").write_bytes(b"")
        os.utime(path, (time.time() - age_s, time.time() - age_s))
        return path

    live = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        stale = [
            made(ended.pid, "ended"),
            made(live.pid, "reused", 1e6),
            made(os.getppid(), "failed"),
            made(2**40, "x"),
        ]
        kept = [made(live.pid, "live"), made(ended.pid, "used"), tmp_path / "furrow-counters-other"]
        kept[2].mkdir()
        held = os.open(kept[1], os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_SH)  # a rank in another container
        folder = share_folder({})
        assert sorted(tmp_path.iterdir()) == sorted([*kept, folder])
        assert share_folder({FOLDER_KEY: str(folder)}) == folder
        assert not any(one.exists() for one in stale)
        os.close(held)
        share_folder({})
        assert not kept[1].exists() and folder.exists()  # the control; this process uses the other one
    finally:
        live.communicate()
