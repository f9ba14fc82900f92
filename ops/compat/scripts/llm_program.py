"""Simon Willison's `llm`, told of the server by its own file of models, or by its plugin for Ollama."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from checks import BASE_URL, CLIENT, KEY, LONG, MODEL, check, main, undisturbed

OLLAMA = CLIENT == "llm-ollama"
NAME = f"ollama/{MODEL}" if OLLAMA else "farm"
LIMIT = "num_predict" if OLLAMA else "max_tokens"
"""The name of the option for the most tokens of an answer."""
MODELS = f"""\
- model_id: farm
  model_name: {MODEL}
  api_base: {BASE_URL}
  can_stream: true
"""


def environment(folder: str) -> dict[str, str]:
    settings = {"OPENAI_API_KEY": KEY}
    if OLLAMA:
        settings = {"OLLAMA_HOST": BASE_URL.removesuffix("/v1"), "OLLAMA_API_KEY": KEY}
    else:
        (Path(folder) / "extra-openai-models.yaml").write_text(MODELS)
    return {**os.environ, "LLM_USER_PATH": folder, "PYTHONUNBUFFERED": "1", **settings}


def command(*words: str, limit: int = 24) -> list[str]:
    options = ["-o", LIMIT, str(limit), "-o", "temperature", "0"]
    return [sys.executable, "-m", "llm", "-m", NAME, *options, *words]


def run(words: list[str], folder: str) -> str:
    process = subprocess.run(
        words, capture_output=True, text=True, timeout=60, env=environment(folder), stdin=subprocess.DEVNULL
    )
    assert process.returncode == 0, process.stderr[-280:]
    return process.stdout.strip()


def ask(folder: str, *words: str, limit: int = 24) -> str:
    return run(command(*words, limit=limit), folder)


@check("an answer, streamed and whole")
def answer() -> None:
    with tempfile.TemporaryDirectory() as folder:
        streamed = ask(folder, "What is a poisoned replica?")
        assert streamed == ask(folder, "--no-stream", "What is a poisoned replica?") and streamed


@check("a second turn")
def conversation() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ask(folder, "What is a poisoned replica?")
        assert ask(folder, "-c", "And then?")


@undisturbed()
def texts() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        with subprocess.Popen(
            command(LONG, limit=150), stdout=subprocess.PIPE, env=environment(folder), stdin=subprocess.DEVNULL
        ) as process:
            while data := os.read(process.stdout.fileno(), 4096):
                yield data.decode()
        assert process.returncode == 0


if OLLAMA:

    @check("models, found by the plugin")
    def models() -> None:
        with tempfile.TemporaryDirectory() as folder:
            assert NAME in run([sys.executable, "-m", "llm", "models"], folder)

    @check("a schema")
    def structured() -> None:
        with tempfile.TemporaryDirectory() as folder:
            assert ask(folder, "--schema", "healthy bool", "Is the replica healthy?", limit=200).startswith("{")


main()
