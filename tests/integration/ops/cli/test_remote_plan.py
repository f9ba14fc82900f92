"""`furrow models plan` reads a hub's headers alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.demo import MODEL_DIR
from tests.hub import Hub
from tests.integration.worker.engine.test_gguf import made
from worker.native.host import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="torch computes models here")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub().running() as hub:
        yield hub


def plan(source: str, cache: Path, endpoint: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "ops.cli", "models", "plan", source, "--kv-tokens", "4096", "--json", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def ranks(ended: subprocess.CompletedProcess[str]) -> object:
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)["ranks"]


def weights_read(hub: Hub, name: str) -> int:
    """Bytes of the file that were asked for."""
    total = 0
    for method, _, file, asked in hub.asked:
        if method == "GET" and file == name:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            assert first and last, f"{name} was asked for whole"
            total += int(last) + 1 - int(first)
    return total


def test_a_plan_reads_only_headers_of_safetensors(hub: Hub, tmp_path: Path) -> None:
    hub.files["org/name"] = {file.name: file.read_bytes() for file in MODEL_DIR.iterdir() if file.is_file()}
    size = len(hub.files["org/name"]["model.safetensors"])
    far = plan("org/name", tmp_path / "cache", hub.url)
    assert ranks(far) == ranks(plan(str(MODEL_DIR), tmp_path / "cache", hub.url))
    assert 0 < weights_read(hub, "model.safetensors") < size / 4
    assert not any(asked[0] == "GET" and asked[2] == "tokenizer.json" for asked in hub.asked)
    assert not (tmp_path / "cache").exists(), "nothing is left in the cache"


def test_a_plan_reads_only_the_header_of_a_gguf_file(hub: Hub, tmp_path: Path) -> None:
    file, _ = made("llama", tmp_path)
    hub.files["org/name-GGUF"] = {file.name: file.read_bytes() + bytes(2**22)}
    far = plan("org/name-GGUF", tmp_path / "cache", hub.url)
    assert ranks(far) == ranks(plan(str(file), tmp_path / "cache", hub.url))
    assert 0 < weights_read(hub, file.name) < 2**21


def test_a_hub_that_is_away_and_a_name_that_it_lacks_are_told(hub: Hub, tmp_path: Path) -> None:
    away = plan("org/name", tmp_path / "cache", "http://127.0.0.1:1")
    assert away.returncode == 1 and "can't be reached" in away.stderr and "Traceback" not in away.stderr
    lacks = plan("org/absent", tmp_path / "cache", hub.url)
    assert lacks.returncode == 1 and "config.json is missing in repository org/absent" in lacks.stderr
