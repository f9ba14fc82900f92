"""The same bytes at the same moments from a plain Litestar `Stream`.

No Redis, no queue, no tokenizer, nothing to resume: what is left is the web server's own cost of so many streams.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from litestar import Litestar, Request, post
from litestar.response import Stream

from ops.bench.fanout.leaders import TEXT, TOKENS, Load, Ring

_WORDS = [f" {word}" for word in TEXT.split()]


@dataclass(eq=False, slots=True)
class _Row:
    client: int
    tokens: int
    due: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Groups:
    """As many groups as the leaders have replicas; each row of a group gets a token at the group's step."""

    def __init__(self, load: Load, ring: Ring) -> None:
        self._load = load
        self._ring = ring
        self._rows: dict[int, set[_Row]] = defaultdict(set)

    async def step(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            for group in range(self._load.replicas):
                due += self._load.pause
                await asyncio.sleep(max(0.0, due - loop.time()))
                now = loop.time()
                for row in self._rows[group]:
                    if row.due < row.tokens:
                        row.due += 1
                        self._ring.times[row.client * TOKENS + row.due % TOKENS] = now
                        row.wake.set()

    async def stream(self, client: int, tokens: int) -> AsyncIterator[bytes]:
        rid = uuid.uuid4().hex
        head = f"id: {rid}:".encode()
        chunk = {"id": f"chatcmpl-{rid}", "object": "chat.completion.chunk", "created": 1_700_000_000}
        data = b".1\ndata: " + msgspec.json.encode(chunk)[:-1] + b',"model":"scripted","choices":['
        texts = [
            msgspec.json.encode({"index": 0, "delta": {"content": word}, "logprobs": None, "finish_reason": None})
            for word in _WORDS
        ]
        row = _Row(client, tokens)
        sent = 0
        group = self._rows[client % self._load.replicas]
        group.add(row)
        try:
            while sent < tokens:
                row.wake.clear()
                events = [
                    b"%b%d%b%b]}\n\n" % (head, seq, data, texts[seq % len(texts)])
                    for seq in range(sent + 1, row.due + 1)
                ]
                if events:
                    sent = row.due
                    yield b"".join(events)
                else:
                    await row.wake.wait()
            yield b"data: [DONE]\n\n"
        finally:
            group.discard(row)


def serve_bare(ring: Path, load: Load, port: int) -> None:
    """Serve until SIGTERM."""
    groups = Groups(load, Ring(ring, load.clients))
    steps: list[asyncio.Task[None]] = []

    @post("/v1/chat/completions", status_code=200)
    async def answer(request: Request[Any, Any, Any]) -> Stream:
        body = await request.json()
        client = int(body["messages"][0]["content"].rpartition(" ")[2])
        return Stream(
            groups.stream(client, body["max_tokens"]), headers={"content-type": "text/event-stream; charset=utf-8"}
        )

    async def start(_: Litestar) -> None:
        steps.append(asyncio.create_task(groups.step()))

    app = Litestar([answer], on_startup=[start], openapi_config=None, logging_config=None)
    uvicorn.run(app, host="127.0.0.1", port=port, loop="uvloop", log_level="error", access_log=False)
