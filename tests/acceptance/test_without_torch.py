"""A farm without torch serves models of C++: others are refused with the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ops.demo import MODEL_DIR
from tests import gguf_models
from tests.farm import Farm, clean_environment, serving_farm
from tests.hidden import without
from tests.waiting import until
from worker.native.library import load_library

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2"),
]

PACKAGES = ("torch", "transformers")
COUNT: list[Any] = [{"role": "user", "content": "Count from 1 to 100."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}},
    "required": ["size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return without(tmp_path_factory.mktemp("hidden"), *PACKAGES)


@pytest.fixture(scope="module")
def farm(hidden: dict[str, str]) -> Iterator[Farm]:
    with serving_farm("demo", "--tp", "2", **hidden) as farm:
        yield farm


def asked(farm: Farm, model: str = "demo", **fields: Any) -> dict[str, Any]:
    """The message of an answer at temperature 0."""
    body = {"model": model, "messages": COUNT, "temperature": 0} | fields
    answer = httpx.post(f"{farm.base_url}/chat/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def test_neither_package_is_found(hidden: dict[str, str]) -> None:
    """What the other tests stand on."""
    program = f"import importlib.util; print([importlib.util.find_spec(one) for one in {PACKAGES!r}])"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=clean_environment(**hidden)
    )
    assert process.stdout == "[None, None]\n"


def test_an_answer_survives_the_death_of_a_rank(farm: Farm) -> None:
    """Two ranks meet, answer, and meet again after one was killed in the middle of an answer."""
    whole = asked(farm)["content"]
    assert whole.endswith("99, 100.")
    body = {"model": "demo", "messages": COUNT, "temperature": 0, "stream": True}
    parts: list[str] = []
    with httpx.stream("POST", f"{farm.base_url}/chat/completions", json=body, timeout=60.0) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                parts += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
                if len(parts) == 20:
                    farm.kill("demo", 1)
    assert "".join(parts) == whole


def test_grammars_tools_and_log_probabilities(farm: Farm) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA, "strict": True}}
    assert set(json.loads(asked(farm, response_format=form)["content"])) == {"size"}
    tool = {"type": "function", "function": {"name": "measure", "parameters": SCHEMA}}
    call = asked(farm, tools=[tool], tool_choice="required")["tool_calls"][0]
    assert json.loads(call["function"]["arguments"])["size"] in ("small", "large")
    body = {"model": "demo", "prompt": "Count", "echo": True, "logprobs": 2, "max_tokens": 2, "temperature": 0.8}
    answer = httpx.post(f"{farm.base_url}/completions", json=body, timeout=60.0).json()
    assert len(answer["choices"][0]["logprobs"]["tokens"]) > 2


@pytest.mark.parametrize("options", [("--quant", "int8"), ("--quant", "q4k"), ("--dtype", "bfloat16")])
def test_every_kind_of_weights(options: tuple[str, str], farm: Farm) -> None:
    name = options[1].replace("_", "-")
    loaded = farm.furrow("models", "load", str(MODEL_DIR), "--name", name, "--wait", *options)
    assert loaded.returncode == 0, loaded.stderr
    assert asked(farm, name, max_tokens=20)["content"]
    assert farm.furrow("models", "unload", name).returncode == 0


def test_a_gguf_file(farm: Farm, tmp_path: Path) -> None:
    file, _ = gguf_models.make("qwen3", tmp_path, ["q8_0"], intermediate_size=96)
    loaded = farm.furrow("models", "load", str(file), "--name", "file", "--wait")
    assert loaded.returncode == 0, loaded.stderr
    body = {"model": "file", "prompt": [3, 4, 5], "max_tokens": 5}
    assert httpx.post(f"{farm.base_url}/completions", json=body, timeout=60.0).status_code == 200
    assert farm.furrow("models", "unload", "file").returncode == 0


def test_what_needs_torch_is_refused_with_the_command(farm: Farm) -> None:
    """At the gate, before a rank starts; the others go on."""
    loaded = farm.furrow("models", "load", str(MODEL_DIR), "--name", "exact", "--wait", "--dtype", "float64")
    assert loaded.returncode != 0
    told = loaded.stdout + loaded.stderr
    assert "torch computes in float64, and torch and transformers are not installed on this host" in told
    assert f"{sys.executable} -m pip install 'torch>=" in told and "'transformers>=" in told
    farm.furrow("models", "unload", "exact")
    assert asked(farm, max_tokens=4)["content"]


def test_no_process_has_torch(farm: Farm) -> None:
    """Their memory has none of its libraries."""
    ranks = until(lambda: [pid for pid in farm.processes() if psutil.Process(pid).name().startswith("furrow-rank")])
    for pid in [*ranks, *farm.processes()]:
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def test_a_run_in_a_pipe(hidden: dict[str, str]) -> None:
    """With a private server, an agent and a leader of its own."""
    command = [sys.executable, "-m", "ops.cli", "run", "demo", "Count from 1 to 5.", "--set", "temperature=0"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean_environment(**hidden))
    assert process.stdout.strip() == "1, 2, 3, 4, 5."
