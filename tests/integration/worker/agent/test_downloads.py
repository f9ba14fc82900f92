"""A download that hangs blocks nobody: an unload ends it, and the next one goes on where it was."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from control.errors import ModelFilesError
from control.keys import ModelKeys
from control.messages import ModelSpec
from control.operations import desired
from control.placement import farm
from control.records import catalog
from tests.hub import Hub
from tests.integration.worker.agent.agent_scene import AgentScene
from tests.integration.worker.conftest import MODEL, ReplicaRedis
from tests.waiting import until
from worker.repository.source import Download

HUNG = [f"org/hung{number}" for number in range(4)]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with Hub().running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def downloads() -> list[psutil.Process]:
    """The processes that download for this test's agent."""
    children = psutil.Process(os.getpid()).children()
    return [child for child in children if is_download(child)]


def is_download(child: psutil.Process) -> bool:
    """One that has ended, and was not reaped yet, has no command line any more."""
    try:
        return "download" in child.cmdline()
    except psutil.Error:
        return False


def want(redis: ReplicaRedis, name: str, source: str) -> None:
    catalog.put_spec(redis.client, ModelSpec(name=name, source=source, devices=["cpu"]))


def state(redis: ReplicaRedis, name: str) -> str | None:
    return redis.client.hget(ModelKeys(name).replica("r0").status, "state")


def test_hung_downloads_block_nobody_and_an_unload_ends_one(scene: AgentScene, hub: Hub) -> None:
    """Four models whose hub never answers; a fifth, from a folder, starts at once."""
    hub.hung.update(HUNG)
    for repository in HUNG:
        want(scene.redis, repository.replace("/", "-"), repository)
    scene.want(tp=1, devices=["cpu"])
    until(lambda: len(scene.pids(0)) == 1, 40.0)
    until(lambda: {asked[1] for asked in hub.asked} >= set(HUNG) and len(downloads()) == 4, 60.0)

    leaving = HUNG[0].replace("/", "-")
    desired.unload(scene.redis.client, leaving)
    began = time.monotonic()
    until(lambda: catalog.get_spec(scene.redis.client, leaving) is None, 40.0)
    assert time.monotonic() - began < 10.0
    until(lambda: len(downloads()) == 3, 10.0)
    assert state(scene.redis, leaving) is None
    assert leaving not in [assignment.spec.name for assignment in farm.assignments(scene.redis.client, "host")]
    scene.stop()
    until(lambda: not downloads(), 10.0)


def test_a_download_that_was_cancelled_leaves_what_is_complete(hub: Hub, tmp_path: Path) -> None:
    """The next one asks for the other files only. The beginning of a file is removed, now or by a later download."""
    hub.files["org/name"] = {
        "config.json": json.dumps({"model_type": "llama"}).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": bytes(range(256)) * 65536,
    }
    hub.cut = ("model.safetensors", 12 << 20)
    cache = tmp_path / "cache"

    def beginnings() -> list[Path]:
        return [path for path in cache.rglob("*.incomplete") if path.stat().st_size > 1 << 20]

    one = Download("org/name", "main", cache)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(one.run, lambda text: None)
        [beginning] = until(beginnings, 60.0)
        one.cancel()
        with pytest.raises(ModelFilesError):
            running.result(20)
    assert beginnings() == []
    beginning.write_bytes(bytes(2 << 20))
    os.utime(beginning, (0, 0))
    hub.cut = None
    texts: list[str] = []
    folder = Download("org/name", "main", cache).run(texts.append)
    assert (folder / "model.safetensors").read_bytes() == hub.files["org/name"]["model.safetensors"]
    assert [asked[2] for asked in hub.asked if asked[0] == "GET"].count("config.json") == 1
    assert beginnings() == [] and any("model.safetensors" in text for text in texts)


def test_a_name_that_nobody_has_fails_within_ten_seconds_offline(
    scene: AgentScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason names the cache and the hub that were tried."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    began = time.monotonic()
    scene.want(source="org/typo", devices=["cpu"], tp=1)
    until(lambda: state(scene.redis, MODEL) == "failed", 30)
    took = time.monotonic() - began
    why = str(scene.redis.client.hget(ModelKeys(MODEL).replica("r0").status, "detail"))
    assert str(tmp_path / "cache") in why and "http://127.0.0.1:1" in why and "Check the name" in why
    assert took < 10 + 5 * os.getloadavg()[0] / (os.cpu_count() or 1), "ten seconds, on an idle machine"
