"""A scripted engine: the HTTP interface of vLLM, SGLang or llama-server, with faults on order and no model.

`python -m ops.harness.scripted_engine SHAPE …` takes the command line of that engine, as far as a listener and a number
of sequences are named there. Its next token follows from the tokens before it alone, so that a continuation equals what
would have come. A POST to `/fault` orders a fault (`Fault`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import zlib
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import uvicorn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

FaultKind = Literal["silence", "half", "repeat", "abort", "error", "refuse", "death"]


class Fault(msgspec.Struct):
    """A fault that happens `times` times, after so many tokens of a request: `silence` sends nothing more, `half` cuts
    the connection in the middle of an event, `repeat` repeats the last token as the request ends early, `abort` ends it
    early without one, `error` is a 500, `refuse` a 400, `death` ends the process."""

    kind: FaultKind
    after: int = 0
    times: int = 1


@dataclass
class Script:
    """The behaviour of an engine of one shape."""

    shape: str
    first: int = 3
    """The lowest token that it gives."""
    last: int = 200
    """The highest one."""
    rate: float = 0.0
    """Tokens a second of each request; 0: as fast as it can."""
    faults: list[Fault] = field(default_factory=list[Fault])
    running: int = 0
    ended_early: int = 0
    """Requests whose client went away before their end."""
    requests: int = 0
    bodies: deque[dict[str, Any]] = field(default_factory=lambda: deque[dict[str, Any]](maxlen=64))
    """The latest requests."""

    def next_token(self, tokens: list[int]) -> int:
        """The token after these."""
        crc = zlib.crc32(array("q", tokens[-16:]).tobytes(), len(tokens))
        return self.first + crc % (self.last - self.first + 1)

    def take_fault(self, count: int) -> Fault | None:
        """The fault that is due after so many tokens of a request; it is counted as done."""
        for fault in self.faults:
            if fault.times > 0 and count >= fault.after:
                fault.times -= 1
                return fault
        return None


@dataclass(frozen=True)
class Order:
    """A request, whatever its shape."""

    prompt: list[int]
    most: int
    least: int
    stop_ids: frozenset[int]
    stream: bool
    logprobs: int | None
    """So many alternatives of each token; None: no log probabilities."""


class Cut(Exception):
    """The connection is to be cut."""


class ScriptedEngine:
    """The application that a server runs."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        if path == "/fault":
            self.script.faults.append(msgspec.json.decode(await _body(receive), type=Fault))
            await _answer(send, {})
        elif path == "/v1/models":
            await _answer(send, {"data": []})
        elif path in ("/version", "/server_info", "/props"):
            await _answer(send, {"version": "scripted", "build_info": "scripted"})
        elif path == "/metrics":
            names = {"vllm": "vllm:num_requests_running", "sglang": "sglang:num_running_reqs"}
            name = names.get(self.script.shape, "llamacpp:requests_processing")
            await _answer(send, f'# TYPE {name} gauge\n{name}{{model_name="m"}} {self.script.running}\n')
        elif path == "/v1/embeddings":
            body = msgspec.json.decode(await _body(receive))
            self.script.requests += 1
            if self.script.take_fault(0) is not None:
                await _answer(send, {"error": {"message": "on order"}}, 500)
            else:
                await _answer(send, {"data": [{"embedding": vector_of(body["input"])}]})
        elif path in ("/v1/completions", "/generate", "/completion"):
            await self._generate(msgspec.json.decode(await _body(receive)), receive, send)
        else:
            await _answer(send, {})

    async def _generate(self, body: dict[str, Any], receive: Receive, send: Send) -> None:
        script = self.script
        script.requests += 1
        script.bodies.append(body)
        fault = script.take_fault(0) if script.faults and script.faults[0].kind in ("error", "refuse") else None
        if fault is not None:
            await _answer(send, {"error": {"message": "on order"}}, 500 if fault.kind == "error" else 400)
            return
        script.running += 1
        leaves = asyncio.create_task(_gone(receive))
        try:
            order = self._order(body)
            if order.stream:
                await self._stream(order, send, leaves)
            else:
                await self._whole(order, send, leaves)
        except Cut:
            raise ConnectionResetError from None  # the server closes the connection
        finally:
            script.running -= 1
            script.ended_early += leaves.done()
            leaves.cancel()

    def _order(self, body: dict[str, Any]) -> Order:
        if self.script.shape == "sglang":
            parameters = body["sampling_params"]
            stop_ids = frozenset(parameters["stop_token_ids"])
            return Order(
                body["input_ids"],
                parameters["max_new_tokens"],
                parameters["min_new_tokens"],
                stop_ids,
                body["stream"],
                body["top_logprobs_num"] if body.get("return_logprob") else None,
            )
        if self.script.shape == "vllm":
            return Order(
                body["prompt"],
                body["max_tokens"],
                body["min_tokens"],
                frozenset(body["stop_token_ids"]),
                bool(body.get("stream")),
                body.get("logprobs"),
            )
        return Order(body["prompt"], body["n_predict"], 0, frozenset(), False, body.get("n_probs") or None)

    async def _tokens(self, order: Order, leaves: asyncio.Task[None]) -> AsyncIterator[tuple[int, str, str]]:
        """Each token with the end that comes with it, if one does, and the fault."""
        script = self.script
        tokens = list(order.prompt)
        for count in range(1, order.most + 1):
            if script.rate:
                await asyncio.sleep(1 / script.rate)
            elif count % 8 == 0:
                await asyncio.sleep(0)
            if leaves.done():
                return
            token = script.next_token(tokens)
            tokens.append(token)
            end = "stop" if token in order.stop_ids and count > order.least else ""
            fault = script.take_fault(count) if script.faults else None
            yield token, end or ("length" if count == order.most else ""), "" if fault is None else fault.kind
            if end:
                return

    async def _stream(self, order: Order, send: Send, leaves: asyncio.Task[None]) -> None:
        await send(_start(200, b"text/event-stream"))
        so_far: list[int] = []
        async for token, end, fault in self._tokens(order, leaves):
            so_far.append(token)
            if fault == "death":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "half":
                await send(_part(b'data: {"choi'))
                raise Cut
            if fault == "silence":
                await leaves
                return
            if fault == "abort":
                end = "abort"
            if fault == "repeat":
                so_far.append(token)
                end = "abort"
            event = self._event(order, so_far, token, end, repeated=fault == "repeat")
            await send(_part(b"data: " + msgspec.json.encode(event) + b"\n\n"))
            if end:
                break
        await send(_part(b"data: [DONE]\n\n", last=True))

    def _event(self, order: Order, so_far: list[int], token: int, end: str, *, repeated: bool) -> dict[str, Any]:
        if self.script.shape == "vllm":
            choice: dict[str, Any] = {"text": "", "token_ids": [token], "finish_reason": end or None}
            if order.logprobs is not None:
                top = {
                    f"token_id:{candidate}": value for candidate, value in alternatives(token, max(1, order.logprobs))
                }
                choice["logprobs"] = {"token_logprobs": [logprob(token)], "top_logprobs": [top]}
            return {"choices": [choice]}
        about: dict[str, Any] = {
            "completion_tokens": len(so_far) - repeated,
            "finish_reason": {"type": end, "message": "on order"} if end else None,
            "cached_tokens": len(order.prompt) // 2,
        }
        if order.logprobs is not None:
            about["output_token_logprobs"] = [[logprob(token_id), token_id, None] for token_id in so_far]
            about["output_top_logprobs"] = [
                [[value, other, None] for other, value in alternatives(token_id, order.logprobs)] or None
                for token_id in so_far
            ]
        return {"output_ids": so_far, "meta_info": about}

    async def _whole(self, order: Order, send: Send, leaves: asyncio.Task[None]) -> None:
        so_far: list[int] = []
        kind = "limit"
        async for token, end, fault in self._tokens(order, leaves):
            if fault == "death":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "silence":
                await leaves
                return
            if fault in ("half", "abort", "repeat"):
                await send(_start(200, b"application/json"))
                await send(_part(b'{"tokens": ['))
                raise Cut
            so_far.append(token)
            kind = {"stop": "eos"}.get(end, "limit")
        answer: dict[str, Any] = {"tokens": so_far, "stop": True, "stop_type": kind, "truncated": False}
        if order.logprobs is not None:
            answer["completion_probabilities"] = [
                {
                    "id": token,
                    "logprob": logprob(token),
                    "top_logprobs": [
                        {"id": candidate, "logprob": value} for candidate, value in alternatives(token, order.logprobs)
                    ],
                }
                for token in so_far
            ]
        await _answer(send, answer | {"timings": {"cache_n": len(order.prompt) // 2}})


def vector_of(tokens: list[int]) -> list[float]:
    """Of an input of these tokens."""
    return [len(tokens) + 0.5, *map(float, tokens[:3])]


def logprob(token: int) -> float:
    """Of each token that it gives, and of each alternative."""
    return -token / 1024


def alternatives(token: int, count: int) -> list[tuple[int, float]]:
    """The most likely tokens, of which the one that is given is the first."""
    return [(candidate, logprob(candidate)) for candidate in range(token, token + count)]


def _start(status: int, kind: bytes) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


def _part(data: bytes, *, last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": not last}


async def _answer(send: Send, content: object, status: int = 200) -> None:
    data = content.encode() if isinstance(content, str) else msgspec.json.encode(content)
    await send(_start(status, b"application/json"))
    await send(_part(data, last=True))


async def _body(receive: Receive) -> bytes:
    data = b""
    more = True
    while more:
        message = await receive()
        data += message.get("body", b"")
        more = bool(message.get("more_body"))
    return data


async def _gone(receive: Receive) -> None:
    """Return when the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


def listener_of(shape: str, words: list[str]) -> dict[str, Any]:
    """The address at which an engine listens by its command line, as uvicorn takes it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds")
    options, _ = parser.parse_known_args(words)
    if options.host.endswith(".sock"):
        return {"uds": options.host}
    return {"uds": options.uds} if options.uds else {"host": options.host, "port": options.port}


def server_of(script: Script, **listener: Any) -> uvicorn.Server:
    """A server of this script, which is not running yet."""
    quiet: dict[str, Any] = {"log_level": "critical", "lifespan": "off", "timeout_graceful_shutdown": 1}
    return uvicorn.Server(uvicorn.Config(ScriptedEngine(script), **quiet, **listener))


def main() -> None:
    shape, *words = sys.argv[1:]
    rate = float(os.environ.get("SCRIPTED_RATE", "0"))
    script = Script(shape, last=int(os.environ.get("SCRIPTED_LAST", "200")), rate=rate)
    print(f"a scripted {shape} starts: {' '.join(words)}", flush=True)
    server_of(script, **listener_of(shape, words)).run()


if __name__ == "__main__":
    main()
