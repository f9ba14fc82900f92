"""Simon Willison's `llm`, told of the server by its own file of models."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE_URL, KEY, MODEL, check, main

FILE = """\
- model_id: farm
  model_name: {model}
  api_base: {url}
  can_stream: true
"""


def llm(folder: str, *words: str) -> str:
    (Path(folder) / "extra-openai-models.yaml").write_text(FILE.format(model=MODEL, url=BASE_URL))
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": KEY}
    command = [sys.executable, "-m", "llm", "-m", "farm", "-o", "max_tokens", "24", "-o", "temperature", "0", *words]
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


@check("a conversation goes on")
def conversation() -> None:
    with tempfile.TemporaryDirectory() as folder:
        llm(folder, "What is a poisoned replica?")
        assert llm(folder, "-c", "And then?")


main()
