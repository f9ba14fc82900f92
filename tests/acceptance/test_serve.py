"""`furrow serve` serves several models; and takes the options of an API process."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.farm import Farm, clean_environment, furrow, serving_farm
from tests.models import make

pytestmark = pytest.mark.timeout(180)
ORIGIN = "https://app.example"


def test_the_api_process_has_no_torch_where_the_ranks_have_it(farm: Farm) -> None:
    """After answers of every kind of text: the libraries are mapped by ranks that compute with them, not by the process
    that listens."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    for path in ("chat/completions", "messages"):
        httpx.post(f"{farm.base_url}/{path}", json=body, timeout=60.0).raise_for_status()
    port = int(farm.address.rpartition(":")[2])
    processes = [psutil.Process(pid) for pid in farm.processes()]
    with_torch = {one.pid for one in processes if "libtorch" in Path(f"/proc/{one.pid}/maps").read_text()}
    listening = {
        one.pid
        for one in processes
        if any(socket.laddr.port == port and socket.status == "LISTEN" for socket in one.net_connections())
    }
    assert farm.pid("demo", 0) in with_torch and len(listening) == 1
    assert not listening & with_torch


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
