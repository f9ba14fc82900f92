"""Metrics of a farm count each request once: also one that survives its leader; the farm's series have one source."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.acceptance.streams import Received, open_stream, receive
from tests.farm import Farm, clean_environment, serving_farm
from tests.prometheus import promtool, scraping
from tests.prometheus_expressions import DASHBOARDS, of_dashboard, of_rules, of_variables
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)

QUESTION: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Count from 1 to 100."}],
    "temperature": 0,
    "max_tokens": 600,
    "ignore_eos": True,
}
TAKE_OVER_S = 5.0
"""Limit of the time until another agent shows the farm's series."""


def address_in(log: Path) -> str:
    """The address of /metrics, as the agent's log says."""
    text = until(lambda: re.search(r"http://([\d.:]+)/metrics", log.read_text()), 40.0)
    return text[1]


def scrape(address: str) -> dict[str, float]:
    """The value of each sample, by name and labels in the order of their names."""
    return {
        " ".join([sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))]): sample.value
        for family in text_string_to_metric_families(_page(address))
        for sample in family.samples
    }


@contextmanager
def second_host(farm: Farm, log: Path) -> Generator[None]:
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


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    with serving_farm("demo", FURROW_METRICS="127.0.0.1:0", FURROW_STANDBY="0") as farm:
        yield farm


def test_metrics_of_a_farm_under_faults(farm: Farm, tmp_path: Path) -> None:
    """A leader is killed in mid-answer; then the agent that shows the farm hangs."""
    address, log = address_in(farm.log), tmp_path / "second"
    r0 = "engine=r0 model_name=demo"
    before = scrape(address)
    received = Received()
    for count, _ in enumerate(receive(open_stream(farm.address, QUESTION), received)):
        if count == 1:
            farm.kill("demo", 0)
    assert received.finish == "length" and received.errors == []
    after = until(lambda: _ended_in_a_new_epoch(scrape(address), before))

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("vllm:request_success_total engine=r0 finished_reason=length model_name=demo") == 1
    assert grown(f"vllm:time_to_first_token_seconds_count {r0}") == 1
    assert grown(f"vllm:e2e_request_latency_seconds_count {r0}") == 1
    # The leader counts an emission after Redis has it, and may be killed between: one has the tokens of 40 ms.
    assert 400 <= grown(f"vllm:generation_tokens_total {r0}") <= 600
    assert grown("furrow_epochs_total model_name=demo") == 1
    assert after["furrow_poisons_total kind=exited model_name=demo"] >= 1
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


def test_every_expression_and_series_has_data(farm: Farm, tmp_path: Path) -> None:
    """A Prometheus scrapes a farm under load whose leader is killed: each expression of dashboards and rules finds
    something, each variable has values, and promtool has nothing to say against the names."""
    agent = address_in(farm.log)
    with asking(farm), scraping(tmp_path, {"furrow-agents": [agent], "furrow-api": [farm.address]}) as prometheus:
        until(lambda: prometheus.query("vllm:generation_tokens_total > 0"), 40.0)
        farm.kill("demo", 0)
        left = of_rules() | {
            f"{file.stem}: {name}": text for file in DASHBOARDS for name, text in of_dashboard(file).items()
        }
        pages = [_page(agent), _page(farm.address)]
        names = [family.name for page in pages for family in text_string_to_metric_families(page)]
        left |= {name: f'{{__name__=~"{name}(_total|_count|_info)?"}}' for name in names}
        assert len(left) > 150 and not _has_data(prometheus.query("vllm:no_such_series"))
        deadline = time.monotonic() + 90
        while left and time.monotonic() < deadline:
            left = {name: text for name, text in left.items() if not _has_data(prometheus.query(text))}
        assert left == {}
        for file in DASHBOARDS:
            for name, (selector, label) in of_variables(file).items():
                assert any(label in one for one in prometheus.series(selector)), (file, name)
        assert {rule["health"] for rule in prometheus.rules()} == {"ok"}
        described = prometheus.metadata()
        assert [name for name, told in described.items() if not told[0]["help"]] == []
    for page in pages:
        ours = [line for line in page.splitlines() if re.match(r"(# \w+ )?furrow_", line)]
        assert promtool("check", "metrics", stdin="\n".join(ours) + "\n") == (0, "")


@contextmanager
def asking(farm: Farm) -> Generator[None]:
    """Two clients that ask again and again, until the end of the block."""
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            receive_all(farm.address, QUESTION | {"max_tokens": 20})

    clients = [threading.Thread(target=ask) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        done.set()
        for client in clients:
            client.join()


def receive_all(address: str, question: dict[str, Any]) -> None:
    for _ in receive(open_stream(address, question), Received()):
        pass


def _page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return answer.read().decode()


def _has_data(samples: list[dict[str, Any]]) -> bool:
    return any(sample["value"][1] != "NaN" for sample in samples)


def _ended_in_a_new_epoch(now: dict[str, float], before: dict[str, float]) -> dict[str, float] | None:
    """`now`, once a request has ended and an epoch begun: they are read from Redis at different times."""
    names = (
        "vllm:request_success_total engine=r0 finished_reason=length model_name=demo",
        "furrow_epochs_total model_name=demo",
    )
    return now if all(now.get(name, 0) > before[name] for name in names) else None


def _first_host(farm: Farm) -> str:
    return next(name for name in farm.redis.smembers("furrow:hosts") if name != "second")
