"""Shared by the tests of /v1/messages: a body and its parts."""

from __future__ import annotations

from typing import Any

import httpx

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def send(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/messages", json={"model": "tiny", "max_tokens": 99, "messages": HELLO} | fields)
