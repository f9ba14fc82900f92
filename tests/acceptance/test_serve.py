"""`furrow serve` with several models and the options of an API process."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.farm import clean_environment, furrow, serving_farm
from tests.models import make

pytestmark = pytest.mark.timeout(180)
ORIGIN = "https://app.example"


def test_two_models_are_served_with_aliases_and_an_origin(tmp_path: Path) -> None:
    """Both answer under their own names and their aliases, to a page of the origin that was named."""
    options = ["--devices", "cpu", "--dtype", "float64", "--cors-origin", ORIGIN]
    options += ["--served-model-name", "gpt-4o=demo", "--served-model-name", "small=tiny"]
    with serving_farm("demo", str(make("llama", tmp_path / "tiny")), *options, FURROW_STANDBY="0") as farm:
        with openai.OpenAI(base_url=farm.base_url, api_key="none") as client:
            assert {"demo", "tiny", "gpt-4o", "small"} <= {model.id for model in client.models.list()}
            for alias, name in (("gpt-4o", "demo"), ("small", "tiny")):
                texts = {
                    client.completions.create(model=one, prompt="abc", max_tokens=8, temperature=0).choices[0].text
                    for one in (alias, name)
                }
                assert len(texts) == 1
        connection = http.client.HTTPConnection(farm.address, timeout=30)
        connection.request("GET", "/v1/models", headers={"Origin": ORIGIN})
        assert connection.getresponse().getheader("Access-Control-Allow-Origin") == ORIGIN
        connection.close()
        assert farm.stop() == 0


def test_commands_find_the_farm_that_runs_here_and_run_is_answered_by_it(tmp_path: Path) -> None:
    """Without --redis; a model that it has not is served by a farm of the command's own. Warnings alone are logged."""
    state = {"XDG_STATE_HOME": str(tmp_path)}
    refused = furrow("ps", **state)
    assert refused.returncode == 1 and "no `furrow serve` runs here" in refused.stderr
    command = [sys.executable, "-m", "ops.cli", "serve", "demo", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment(**state)
    ) as serving:
        assert serving.stdout is not None and serving.stderr is not None
        assert "demo is served at http://127.0.0.1:" in serving.stdout.readline()
        assert "demo" in furrow("ps", **state).stdout
        answered = furrow("run", "demo", "What is 2 + 3?", "--set", "temperature=0", **state)
        assert "5" in answered.stdout and "answered by the `furrow serve` that runs here" in answered.stderr
        other = furrow("run", str(make("llama", tmp_path / "tiny")), "abc", "--set", "max_tokens=4", **state)
        assert other.returncode == 0 and "answered by" not in other.stderr
        assert "tiny" not in furrow("models", "list", **state).stdout
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(60) == 0
        lines = serving.stderr.read().splitlines()
    assert 2 <= len(lines) <= 5 and all(line.startswith("furrow: ") for line in lines), lines
    assert furrow("ps", **state).returncode == 1
