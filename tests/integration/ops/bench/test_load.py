"""The load generator works on a real farm; and against a Redis that knows nothing of its requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from control.operations.spec import build_spec
from ops.bench.load.load import SCENARIOS, SEGMENTS, Scenario, load
from ops.demo import MODEL_DIR
from ops.harness.farm import private_farm
from tests.servers import Server

pytestmark = pytest.mark.timeout(180)

STREAMS = Scenario("streams", (1, 1), users=2, requests=8, concurrency=4, max_tokens=6)
WHOLE = Scenario("whole", (1,), users=1, requests=3, concurrency=2, max_tokens=6, stream=False)


@pytest.fixture(scope="module")
def farm() -> Iterator[tuple[str, str, list[str]]]:
    """Two models of one replica each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("FURROW_STANDBY", "0")
        spec = build_spec(str(MODEL_DIR), name="two", devices="cpu", max_context=512, kv_tokens=4096)
        with private_farm(spec, replicas=(1, 1)) as running:
            yield running.url, running.redis_url, running.names


@pytest.fixture(autouse=True)
def small_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    for scenario in (STREAMS, WHOLE):
        monkeypatch.setitem(SCENARIOS, scenario.name, scenario)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(load, arguments)


def test_every_segment_has_data(farm: tuple[str, str, list[str]], tmp_path: Path) -> None:
    """Streams and whole answers of a real farm fill every segment, per model and per user too."""
    url, redis_url, models = farm
    assert models == ["two-1", "two-2"]
    bench_result = bench("streams", "whole", "--url", url, "--redis", redis_url, "--json", str(tmp_path / "out.json"))
    assert bench_result.exit_code == 0, bench_result.output
    streams, whole = json.loads((tmp_path / "out.json").read_text())["scenarios"]
    for result, scenario in ((streams, STREAMS), (whole, WHOLE)):
        assert (result["total"], result["success"], result["errors"]) == (scenario.requests, scenario.requests, {})
        assert {name: one["count"] for name, one in result["segments"].items()} == dict.fromkeys(
            SEGMENTS, scenario.requests
        )
        assert result["segments"]["decode"]["max"] > 0
    assert {name: group["success"] for name, group in streams["models"].items()} == {"two-1": 4, "two-2": 4}
    assert {name: group["success"] for name, group in streams["users"].items()} == {"user-0": 4, "user-1": 4}
    assert "two-2" in bench_result.output


def test_a_redis_without_the_timestamps_fails_the_scenario(
    farm: tuple[str, str, list[str]], new_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The must-fail control: all requests succeed, no segment has data, and the exit status says so."""
    monkeypatch.setattr("ops.bench.load.load.PATIENCE_MS", 500.0)
    result = bench("whole", "--url", farm[0], "--redis", new_server.url)
    assert result.exit_code == 1
    assert "3 requests, 3 succeeded" in result.output
    for name in SEGMENTS:
        assert f"segment '{name}' has data for 0 of 3 requests" in result.output


def test_a_model_that_is_not_there_fails_with_its_kind(farm: tuple[str, str, list[str]]) -> None:
    """Errors are counted by their code."""
    result = bench("whole", "--url", farm[0], "--redis", farm[1], "--model", "other")
    assert result.exit_code == 1
    assert "FAILED: 3 requests failed: 404 model_not_found" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["whole"], "give either --url (and --redis) of a farm that runs, or --self"),
        (["whole", "--url", "ftp://x", "--redis", "redis://127.0.0.1:1"], "'ftp://x' is not http://HOST:PORT"),
        (["streams", "--url", "http://127.0.0.1:1", "--redis", "redis://127.0.0.1:1"], "no API answers at 127.0.0.1:1"),
        (["streams", "--url", "http://h", "--redis", "redis://h", "--model", "a"], "streams asks 2 models; served: a"),
    ],
)
def test_what_can_not_be_measured_is_refused(arguments: list[str], message: str) -> None:
    """The message names what is missing."""
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in result.output
