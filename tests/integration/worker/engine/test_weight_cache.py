"""Files of packed weights are bounded and whole: written whole or not at all, and never in a model's way."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from tests.integration.worker.engine.kept_weights import (
    HIT,
    KEPT,
    NOT_KEPT,
    Checkpoint,
    loaded,
    logits,
    memory,
    the_file,
)
from worker.collective import Solo
from worker.models.loading import load
from worker.models.served import ServedModel
from worker.native.library import load_library
from worker.weights.cache import WeightCache

pytestmark = [
    pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2"),
    pytest.mark.usefixtures("weights"),
]


def test_writers_of_one_file_do_not_disturb_each_other(checkpoint: Checkpoint, weights: Path) -> None:
    """Replicas of a model on one host start together."""
    source, results = checkpoint("llama"), list[ServedModel]()
    caches = [WeightCache(2**30, least=0) for _ in range(4)]
    begun = threading.Barrier(len(caches))

    def start(kept: WeightCache) -> None:
        begun.wait()
        results.append(load(source, collective=Solo(), dtype="float32", quant="int8", cache=kept))
        if kept.writing is not None:
            kept.writing.join(30)

    threads = [threading.Thread(target=start, args=(kept,)) for kept in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert the_file(weights).suffix == ".weights"
    again, logs = loaded(source)
    assert HIT in logs
    assert all(all(map(torch.equal, memory(again), memory(one))) for one in results)


def test_a_file_that_a_killed_process_left_is_removed(checkpoint: Checkpoint, weights: Path) -> None:
    """One that is being written stays: its writer holds a lock."""
    weights.mkdir(parents=True)
    (weights / "write-dead").write_bytes(b"half")
    holding = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); input()"
    writer = subprocess.Popen(
        [sys.executable, "-c", holding, str(weights / "write-alive")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    try:
        assert KEPT in loaded(checkpoint("llama"))[1]
        assert {path.name for path in weights.iterdir() if path.suffix != ".weights"} == {"write-alive"}
    finally:
        writer.communicate()


def test_a_folder_that_can_t_be_written_to(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The model serves, and the log says why nothing is kept."""
    (tmp_path / "cache").write_text("a file")
    model, logs = loaded(checkpoint("llama"))
    assert NOT_KEPT in logs
    assert logits(model).isfinite().all()


def test_a_full_disk(checkpoint: Checkpoint, weights: Path) -> None:
    """Nothing is left of a file that did not fit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        model, logs = loaded(checkpoint("llama"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert NOT_KEPT in logs
    assert list(weights.iterdir()) == []
    assert logits(model).isfinite().all()


def test_the_files_that_were_not_used_for_longest_make_room(checkpoint: Checkpoint, weights: Path) -> None:
    names = ["llama", "mistral", "qwen3"]
    for age, name in enumerate(reversed(names)):
        loaded(checkpoint(name))
        newest = max(weights.iterdir(), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (1000 - age, 1000 - age))
    sizes = [path.stat().st_size for path in weights.iterdir()]
    assert HIT in loaded(checkpoint("llama"))[1]  # the oldest, used again
    cache = WeightCache(sum(sizes) + min(sizes) // 2, least=0)
    load(checkpoint("qwen2"), collective=Solo(), dtype="float32", quant="int8", cache=cache)
    assert cache.writing is not None
    cache.writing.join(30)
    labels = {path.name.partition("-")[0].rstrip("0123456789") for path in weights.iterdir()}
    assert "llama" in labels and "mistral" not in labels


@pytest.mark.parametrize("limit", [0, 10_000])
def test_a_limit_that_a_model_does_not_fit(limit: int, checkpoint: Checkpoint, weights: Path) -> None:
    cache = WeightCache(limit, least=0)
    with capture_logs() as logs:
        load(checkpoint("llama"), collective=Solo(), dtype="float32", quant="int8", cache=cache)
        if cache.writing is not None:
            cache.writing.join(30)
    assert not weights.exists() or not list(weights.iterdir())
    assert (NOT_KEPT in [entry["event"] for entry in logs]) == (limit > 0)


def test_small_models_are_not_kept(checkpoint: Checkpoint, weights: Path) -> None:
    """Their checkpoints are read as fast."""
    load(checkpoint("llama"), collective=Solo(), dtype="float32", quant="int8", cache=WeightCache(2**30))
    assert not weights.exists()
