"""A second model gets unused KV memory of the first: while that one serves on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.farm import Farm, serving_farm
from tests.waiting import until

pytestmark = pytest.mark.timeout(180)

MIB = 2**20
MEMORY = 400 * MIB
SMALL = ("--max-context", "4096", "--kv-type", "f32")
"""A replica keeps one whole context; the demonstration model's own is longer than this host's memory. In 16 bits all
prefixes would have room beside the second model."""


def pss(pid: int) -> int:
    """Bytes that a process takes, and its part of what it shares."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"process {pid} has no Pss")


def replica_of(farm: Farm, model: str) -> dict[str, Any]:
    models = farm.get("/farm")[1]["models"]
    return next((one["replicas"][0] for one in models if one["model"] == model and one["replicas"]), {})


def test_a_second_model_gets_what_the_first_does_not_use() -> None:
    """Its kept prefixes go, its process takes that much less, a stream of it goes on, and no process is replaced."""
    with serving_farm("demo", "--memory", "400MiB", *SMALL) as farm:
        client = openai.OpenAI(base_url=farm.base_url, api_key="none")
        for number in range(40):
            prompt = " ".join(str((number * 7919 + index * 31) % 9973) for index in range(500))
            client.completions.create(model="demo", prompt=prompt, max_tokens=4)
        beat = until(lambda: (beat := replica_of(farm, "demo")["beats"][0]) and beat["kv_kept"] > 80_000 and beat)
        before = pss(beat["pid"])
        answer: list[str] = []

        def ask() -> None:
            body: dict[str, Any] = {"prompt": "Once", "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
            chunks = client.completions.create(model="demo", temperature=0, stream=True, **body)
            answer.extend(chunk.choices[0].text for chunk in chunks if chunk.choices)

        stream = threading.Thread(target=ask)
        stream.start()
        until(lambda: len(answer) > 2)
        loaded = farm.furrow("models", "load", "demo", "--name", "second", *SMALL, "--wait")
        assert loaded.returncode == 0, loaded.stderr
        told = client.completions.create(model="second", prompt="Once", max_tokens=4)
        assert told.usage is not None and told.usage.completion_tokens
        stream.join()
        body: dict[str, Any] = {"prompt": "Once", "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
        alone = client.completions.create(model="demo", temperature=0, **body)
        assert "".join(answer) == alone.choices[0].text
        after = replica_of(farm, "demo")["beats"][0]
        assert after["pid"] == beat["pid"] and after["epoch"] == beat["epoch"]
        assert after["kv_used"] + after["kv_kept"] <= after["kv_limit"] < beat["kv_limit"]
        [host] = farm.get("/farm")[1]["hosts"]
        assert sum(host["assigned"].values()) <= MEMORY and set(host["assigned"]) == {"demo:r0", "second:r0"}
        given_back = beat["kv_limit"] - after["kv_limit"]
        assert pss(beat["pid"]) < before - 0.8 * given_back * 4096 and pss(beat["pid"]) <= host["assigned"]["demo:r0"]
