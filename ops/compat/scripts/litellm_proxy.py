"""litellm's proxy in front of the farm: the official clients talk to it, it talks to the farm."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
from checks import (
    BASE_URL,
    CITY,
    KEY,
    LONG,
    LOOP,
    MODEL,
    TURNS,
    WEATHER,
    chat_loop,
    check,
    main,
    messages_loop,
    refused,
    undisturbed,
)

SECRET = f"sk-{secrets.token_hex(32)}"
"""The proxy refuses to start without a key of its own, or with a short one."""
CONFIG = {
    "model_list": [
        {"model_name": "farm", "litellm_params": {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": KEY}}
    ],
    "litellm_settings": {"telemetry": False},
    "general_settings": {"master_key": SECRET},
}


@contextmanager
def proxy() -> Iterator[str]:
    """The base URL of a proxy that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps(CONFIG))
        command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env={**os.environ, "HOME": folder})
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(f"{url}/health/liveliness", process, Path(folder) / "log")
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _wait(url: str, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(log.read_text()[-1200:]) from error
            time.sleep(0.2)


with proxy() as url:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=SECRET, max_retries=0, timeout=60)
    claude = anthropic.Anthropic(base_url=url, api_key=SECRET, max_retries=0, timeout=60)

    @check("a chat, whole and streamed")
    def chat() -> None:
        fields: Any = {"model": "farm", "messages": [{"role": "user", "content": TURNS[1]}], "temperature": 0}
        whole = client.chat.completions.create(**fields)
        stream = client.chat.completions.create(**fields, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == whole.choices[0].message.content and text
        assert whole.usage.total_tokens > 0

    @check(f"chat: {LOOP}")
    def loop() -> None:
        def ask(messages: list[Any]) -> Any:
            return client.chat.completions.create(model="farm", messages=messages, tools=[WEATHER]).choices[0].message

        chat_loop(ask)

    @check(f"messages: {LOOP}")
    def messages() -> None:
        """The proxy translates Messages itself."""
        weather: Any = {"name": "get_weather", "input_schema": CITY}

        def ask(messages: list[Any]) -> Any:
            return claude.messages.create(model="farm", messages=messages, tools=[weather], max_tokens=400)

        messages_loop(ask)

    @check("errors with the server's message")
    def errors() -> None:
        wrong: Any = {"model": "farm", "messages": [{"role": "user", "content": ""}], "temperature": 6}
        error = refused(openai.BadRequestError, lambda: client.chat.completions.create(**wrong))
        assert "temperature" in str(error)

    @undisturbed()
    def texts() -> Iterator[str]:
        messages: Any = [{"role": "user", "content": LONG}]
        fields: Any = {"max_tokens": 150, "temperature": 0, "stream": True}
        for chunk in client.chat.completions.create(model="farm", messages=messages, **fields):
            yield (chunk.choices[0].delta.content or "") if chunk.choices else ""

    main()
