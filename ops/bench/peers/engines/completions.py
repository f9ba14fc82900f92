"""One completion as a client of any of the servers sees it, each token with its time."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from ops.bench.common import alphabet
from ops.bench.common.client import Base, Response, request
from ops.bench.peers.base import Failed, Stream

PATH = "/v1/completions"
LIMIT_S = 7200.0
"""For a whole run: the slowest server's longest, so that only a hang reaches it."""


async def complete_all(base: Base, fields: dict[str, Any], prompts: list[list[int]], tokens: int) -> list[Stream]:
    """All prompts at once, each on a connection of its own; `fields` are what this server wants in the body beside
    them. Raises Failed."""
    try:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(complete(base, fields, prompt, tokens)) for prompt in prompts]
    except* (OSError, asyncio.IncompleteReadError) as group:
        raise Failed(f"the connection failed: {group.exceptions[0]}") from group
    except* Failed as group:
        raise Failed(str(group.exceptions[0])) from group
    return [task.result() for task in running]


async def complete(base: Base, fields: dict[str, Any], prompt: list[int], tokens: int) -> Stream:
    """Stream one completion. A token is a character of its text. Raises Failed, OSError or IncompleteReadError."""
    body = {"prompt": alphabet.text_of(prompt), "max_tokens": tokens, "temperature": 0, "stream": True, **fields}
    headers = {"content-type": "application/json", "authorization": "Bearer bench"}
    stream = Stream(time.monotonic())
    async with request(base, "POST", PATH, body=json.dumps(body).encode(), headers=headers) as response:
        if response.status != 200:
            raise Failed(f"status {response.status}: {(await response.read())[:300].decode(errors='replace')}")
        await _read(response, stream, len(prompt))
    return stream


async def _read(response: Response, stream: Stream, prompt_tokens: int) -> None:
    async for _, data, _ in response.events():
        if data == b"[DONE]":
            return
        now = time.monotonic()
        chunk = json.loads(data)
        if "error" in chunk:
            raise Failed(f"in the stream: {chunk['error']}")
        for choice in chunk.get("choices", []):
            stream.add(now, *alphabet.ids_of(choice.get("text") or ""))
        counted = (chunk.get("usage") or {}).get("prompt_tokens", prompt_tokens)
        if counted != prompt_tokens:
            raise Failed(f"it counts {counted} tokens in a prompt of {prompt_tokens}")
