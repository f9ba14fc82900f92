"""Metrics of a real farm: a request that survives its leader counts once, and the farm's series have one source."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.acceptance.streams import Received, open_stream, receive
from tests.farm import Farm, clean_environment, serving_farm
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)

QUESTION: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Count from 1 to 100."}],
    "temperature": 0,
    "max_tokens": 120,
}
TAKE_OVER_S = 5.0
"""Limit of the time until another agent shows the farm's series."""


def address_in(log: Path) -> str:
    """The address of /metrics, as the agent's log says."""
    found = until(lambda: re.search(r"http://([\d.:]+)/metrics", log.read_text()), 40.0)
    return found[1]


def scrape(address: str) -> dict[str, float]:
    """The value of each sample, by name and labels in the order of their names."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        " ".join([sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@contextmanager
def second_host(farm: Farm, log: Path) -> Iterator[None]:
    environment = clean_environment(FURROW_REDIS_URL=farm.redis_url, FURROW_METRICS="127.0.0.1:0", FURROW_STANDBY="0")
    command = [sys.executable, "-m", "ops.cli", "worker", "--host-id", "second"]
    with log.open("w") as sink:
        process = subprocess.Popen(command, env=environment, stderr=sink)
    try:
        until(lambda: farm.redis.exists("furrow:host:second"), 40.0)
        yield
    finally:
        process.terminate()
        process.wait(60)


def test_metrics_of_a_farm_under_faults(tmp_path: Path) -> None:
    """A leader is killed in mid-answer; then the agent that shows the farm hangs."""
    with serving_farm("demo", FURROW_METRICS="127.0.0.1:0", FURROW_STANDBY="0") as farm:
        address, log = address_in(farm.log), tmp_path / "second"
        r0 = "engine=r0 model_name=demo"
        before = scrape(address)
        received = Received()
        for count, _ in enumerate(receive(open_stream(farm.address, QUESTION), received)):
            if count == 5:
                farm.kill("demo", 0)
        assert received.finish == "length" and received.errors == []
        after = until(lambda: _ended(scrape(address), before))

        def grown(name: str) -> float:
            return after[name] - before[name]

        assert grown("vllm:request_success_total engine=r0 finished_reason=length model_name=demo") == 1
        assert grown(f"vllm:time_to_first_token_seconds_count {r0}") == 1
        assert grown(f"vllm:e2e_request_latency_seconds_count {r0}") == 1
        assert grown(f"vllm:generation_tokens_total {r0}") == 120
        assert after["furrow_epochs_total model_name=demo"] == 2
        assert after["furrow_poisons_total kind=exited model_name=demo"] == 1
        with second_host(farm, log):
            other = address_in(log)
            assert "furrow_replicas_wanted model_name=demo" not in scrape(other)
            assert not any("engine" in name for name in scrape(other))
            holder = int(farm.redis.hget(f"furrow:host:{_first_host(farm)}", "pid") or 0)
            os.kill(holder, signal.SIGSTOP)
            began = time.monotonic()
            until(lambda: "furrow_replicas_wanted model_name=demo" in scrape(other), 20.0)
            assert time.monotonic() - began < TAKE_OVER_S
            os.kill(holder, signal.SIGCONT)


def _ended(now: dict[str, float], before: dict[str, float]) -> dict[str, float] | None:
    name = "vllm:request_success_total engine=r0 finished_reason=length model_name=demo"
    return now if now.get(name, 0) > before[name] else None


def _first_host(farm: Farm) -> str:
    return next(name for name in farm.redis.smembers("furrow:hosts") if name != "second")
