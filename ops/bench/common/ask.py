"""One chat request as a client sees it: when it was sent, when it spoke, when it ended, and what went wrong."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from ops.bench.common.client import Base, Response, request

LIMIT_S = 600.0
"""For a whole answer: far above any scenario's, so that only a hang reaches it."""


@dataclass(slots=True)
class Answer:
    """Times are ms since 1970 by this machine's clock. `error` names the kind of failure, None for a success."""

    user: str
    model: str
    rid: str = ""
    sent_ms: float = 0.0
    first_ms: float | None = None
    """First text at the client; streams only."""
    end_ms: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    retry_after_s: float | None = None
    """The Retry-After of a refusal."""
    text: str = ""
    error: str | None = None


def now_ms() -> float:
    return time.time_ns() / 1e6


async def ask(base: Base, user: str, model: str, prompt: str, max_tokens: int, stream: bool, **fields: Any) -> Answer:
    """Never raises for what the server or the network did: that is a measurement too.

    `user` is a bearer token, "" for none; `fields` are more of the body's.
    """
    answer = Answer(user, model, sent_ms=now_ms())
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        # Every request costs the same, whatever the model would like to say.
        "ignore_eos": True,
        "stream": stream,
        **fields,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {user}"} if user else {})
    try:
        async with asyncio.timeout(LIMIT_S):
            path, data = "/v1/chat/completions", json.dumps(body).encode()
            async with request(base, "POST", path, body=data, headers=headers) as response:
                answer.rid = response.headers.get("x-request-id", "")
                if "retry-after" in response.headers:
                    answer.retry_after_s = float(response.headers["retry-after"])
                await (_read_stream if stream and response.status == 200 else _read_whole)(response, answer)
    except TimeoutError:
        answer.error = "timeout"
    except asyncio.IncompleteReadError:
        answer.error = "connection cut"
    except OSError as error:
        answer.error = f"connection failed: {error.strerror or error}"
    answer.end_ms = now_ms()
    if answer.error is None and answer.tokens != max_tokens:
        answer.error = f"{answer.tokens} of {max_tokens} tokens"
    return answer


async def _read_whole(response: Response, answer: Answer) -> None:
    body = json.loads(await response.read())
    if response.status != 200:
        answer.error = f"{response.status} {kind_of(body)}"
    else:
        _count(answer, body["usage"])
        answer.text = "".join(choice["message"]["content"] or "" for choice in body.get("choices", []))


async def _read_stream(response: Response, answer: Answer) -> None:
    done = False
    async for _, data, _ in response.events():
        if data == b"[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            answer.error = f"in the stream: {kind_of(chunk)}"
        if answer.first_ms is None and any(choice["delta"].get("content") for choice in chunk.get("choices", [])):
            answer.first_ms = now_ms()
        answer.text += "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", []))
        if chunk.get("usage"):
            _count(answer, chunk["usage"])
    if not done and answer.error is None:
        answer.error = "no [DONE]"


def _count(answer: Answer, usage: dict[str, int]) -> None:
    answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


def kind_of(body: Any) -> str:
    """The machine-readable reason of an error body."""
    error = body.get("error", {}) if isinstance(body, dict) else {}
    return str(error.get("code") or error.get("type") or "without a reason")
