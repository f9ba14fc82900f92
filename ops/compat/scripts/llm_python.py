"""Simon Willison's `llm`, told of the server by its own file of models."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from checks import BASE_URL, KEY, LONG, MODEL, check, main, undisturbed

FILE = """\
- model_id: farm
  model_name: {model}
  api_base: {url}
  can_stream: true
"""


def prepared(folder: str, words: tuple[str, ...], limit: int = 24) -> tuple[list[str], dict[str, str]]:
    """The command and its environment."""
    (Path(folder) / "extra-openai-models.yaml").write_text(FILE.format(model=MODEL, url=BASE_URL))
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": KEY, "PYTHONUNBUFFERED": "1"}
    options = ["-o", "max_tokens", str(limit), "-o", "temperature", "0"]
    return [sys.executable, "-m", "llm", "-m", "farm", *options, *words], environment


def llm(folder: str, *words: str) -> str:
    command, environment = prepared(folder, words)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-280:]
    return done.stdout.strip()


@check("an answer, streamed and whole")
def answer() -> None:
    with tempfile.TemporaryDirectory() as folder:
        streamed = llm(folder, "What is a poisoned replica?")
        assert streamed == llm(folder, "--no-stream", "What is a poisoned replica?") and streamed


@check("a second turn")
def conversation() -> None:
    with tempfile.TemporaryDirectory() as folder:
        llm(folder, "What is a poisoned replica?")
        assert llm(folder, "-c", "And then?")


@undisturbed()
def texts() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        command, environment = prepared(folder, (LONG,), 150)
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, stdin=subprocess.DEVNULL) as process:
            while data := os.read(process.stdout.fileno(), 4096):
                yield data.decode()
        assert process.returncode == 0


main()
