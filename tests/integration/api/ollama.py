"""Shared by the tests of Ollama's dialect: bodies, and the lines of its streams."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/api/chat", json={"model": "tiny", "messages": HELLO} | fields)


def generate(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/api/generate", json={"model": "tiny", "prompt": "hello"} | fields)


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream; no line is empty, and each ends with a line break."""
    assert response.text.endswith("\n")
    return [msgspec.json.decode(line) for line in response.text[:-1].split("\n")]


def content_of(lines: list[dict[str, Any]]) -> str:
    return "".join(line["message"]["content"] for line in lines)
