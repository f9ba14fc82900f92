"""Simon Willison's `llm` with its plugin for Ollama, which finds the models by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from checks import BASE_URL, KEY, LONG, MODEL, check, main, undisturbed


def prepared(folder: str, *words: str, limit: int = 24) -> tuple[list[str], dict[str, str]]:
    """The command for a prompt and its environment."""
    environment = os.environ | {
        "LLM_USER_PATH": folder,
        "OLLAMA_HOST": BASE_URL.removesuffix("/v1"),
        "OLLAMA_API_KEY": KEY,
        "PYTHONUNBUFFERED": "1",
    }
    options = ["-o", "num_predict", str(limit), "-o", "temperature", "0"]
    return [sys.executable, "-m", "llm", "-m", f"ollama/{MODEL}", *options, *words], environment


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-280:]
    return done.stdout.strip()


@check("models, found by the plugin")
def models() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _, environment = prepared(folder)
        assert f"ollama/{MODEL}" in run([sys.executable, "-m", "llm", "models"], environment)


@check("an answer, streamed and whole")
def answer() -> None:
    with tempfile.TemporaryDirectory() as folder:
        streamed = run(*prepared(folder, "What is a poisoned replica?"))
        assert streamed == run(*prepared(folder, "--no-stream", "What is a poisoned replica?")) and streamed


@check("a second turn")
def conversation() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(*prepared(folder, "What is a poisoned replica?"))
        assert run(*prepared(folder, "-c", "And then?"))


@check("a schema")
def structured() -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = ("--schema", "healthy bool", "Is the replica healthy?")
        assert run(*prepared(folder, *words, limit=200)).startswith("{")


@undisturbed()
def texts() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        command, environment = prepared(folder, LONG, limit=150)
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, stdin=subprocess.DEVNULL) as process:
            while data := os.read(process.stdout.fileno(), 4096):
                yield data.decode()
        assert process.returncode == 0


main()
