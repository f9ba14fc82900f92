"""The connections to an external engine: a thread that sends pieces, and a queue of what the engine answers."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Literal, TypeVar

import httpx
import msgspec
import structlog

from worker.external.engine import Address, EngineStats, ExternalEngine, Part, Piece

log = structlog.get_logger()
logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request, else

T = TypeVar("T")

CONNECT_S = 5.0
LOOK_S = 1.0
"""For an answer of an engine that loads its model, or of a gauge."""
LOST_S = 5.0
"""An engine that served is lost where it does not answer /health for so long; one that has ended refuses the connection
at once."""
STATS_EVERY_S = 2.0
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}]*\})? ([-+0-9.eE]+|NaN|[+-]Inf)$", re.MULTILINE)

Failure = Literal["", "refused", "failed", "lost"]
"""The reason why a piece brings nothing more: the engine refused the request, it failed at it, or its connection is
gone."""


@dataclass(frozen=True, slots=True)
class Output:
    """News of a piece. `failure` is empty for tokens and for an end that the engine itself gave."""

    key: int
    part: Part
    failure: Failure = ""


class EngineClient:
    """One engine's connections. A context manager; the methods are for one other thread."""

    def __init__(self, engine: ExternalEngine, address: Address) -> None:
        self._engine = engine
        self._address = address
        self._outputs: SimpleQueue[Output] = SimpleQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._client: httpx.AsyncClient
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.stats = EngineStats()
        """As the engine told them last."""
        self._hits_counted: int | None = None

    def __enter__(self) -> EngineClient:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)

    def submit(self, key: int, piece: Piece) -> None:
        """Ask for a piece. Its outputs come under `key`, until one has an end, an error or a failure."""
        path, body = self._engine.request(piece)
        self._call(self._begin(key, path, msgspec.json.encode(body), piece))

    def cancel(self, key: int) -> None:
        """Cancel a piece by closing its connection. Outputs on their way still come."""
        self._loop.call_soon_threadsafe(self._cancel, key)

    def outputs(self, seconds: float) -> list[Output]:
        """The outputs that have come; waits for the first one, `seconds` at most."""
        outputs: list[Output] = []
        with suppress(Empty):
            outputs.append(self._outputs.get(timeout=seconds) if seconds > 0 else self._outputs.get_nowait())
            while True:
                outputs.append(self._outputs.get_nowait())
        return outputs

    def prefix_hits(self) -> int:
        """Tokens that the engine has found in its prefix cache since the last call, where only its gauges tell."""
        total = self.stats.prefix_hits
        if total is None:
            return 0
        before = total if self._hits_counted is None else self._hits_counted
        self._hits_counted = total
        return total - before if total >= before else total  # else it was started again

    def is_ready(self, patience_s: float = LOOK_S) -> bool:
        """True if the engine answers that its model is loaded."""
        return self._ask(self._ready(patience_s), patience_s) or False

    def known_models(self) -> list[str]:
        """The names of the models that the engine says it has; empty where it does not say."""
        return self._ask(self._models(), LOOK_S) or []

    def version(self) -> str:
        """The engine's version in its own words; empty where it does not say."""
        return self._ask(self._version(), LOOK_S) or ""

    def _ask(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T | None:
        """The result; None where the engine gives none."""
        try:
            return self._call(coroutine).result(seconds + 1.0)
        except Exception:
            return None

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        transport = httpx.AsyncHTTPTransport(uds=self._address.socket or None, limits=limits)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        self._client = httpx.AsyncClient(transport=transport, base_url=self._address.base_url, timeout=timeout)
        polling = self._loop.create_task(self._poll())
        self._loop.run_forever()
        tasks = [polling, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _begin(self, key: int, path: str, body: bytes, piece: Piece) -> None:
        task = self._loop.create_task(self._follow(key, path, body, piece))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def _cancel(self, key: int) -> None:
        if (task := self._tasks.get(key)) is not None:
            task.cancel()

    async def _follow(self, key: int, path: str, body: bytes, piece: Piece) -> None:
        """One request, and all of its answer."""
        headers = {"Content-Type": "application/json"}
        try:
            async with self._client.stream("POST", path, content=body, headers=headers) as response:
                if response.status_code != 200:
                    text = _message(await response.aread())
                    failure: Failure = "refused" if response.status_code < 500 else "failed"
                    self._put(key, Part([], error=f"{response.status_code}: {text}"), failure)
                elif self._engine.streams and not piece.embeds:
                    await self._read_stream(key, response, piece)
                else:
                    part = self._part(await response.aread(), 0, piece)
                    self._put(key, part, "failed" if part.error else "")
        except httpx.HTTPError as error:
            self._put(key, Part([], error=f"{type(error).__name__}: {error}"), "lost")
        except Exception as error:
            log.exception("an engine's answer can't be read", engine=self._engine.name, action="read_engine")
            self._put(key, Part([], error=f"its answer can't be read: {error!r}"), "failed")

    async def _read_stream(self, key: int, response: httpx.Response, piece: Piece) -> None:
        have = 0
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                break
            part = self._part(data.encode(), have, piece)
            have += len(part.tokens)
            if part.tokens or part.end or part.error:
                self._put(key, part, "failed" if part.error else "")
            if part.end or part.error:
                return
        self._put(key, Part([], error="its stream ended without a last event"), "lost")

    def _part(self, data: bytes, have: int, piece: Piece) -> Part:
        answer = msgspec.json.decode(data)
        return Part([], error=_error_in(answer)) if "error" in answer else self._engine.part(answer, have, piece)

    def _put(self, key: int, part: Part, failure: Failure) -> None:
        self._outputs.put(Output(key, part, failure))

    async def _ready(self, patience_s: float) -> bool:
        response = await self._client.get(self._engine.health, timeout=patience_s)
        return response.status_code == 200

    async def _models(self) -> list[str]:
        response = await self._client.get("/v1/models", timeout=LOOK_S)
        return [str(model["id"]) for model in response.json().get("data", [])]

    async def _version(self) -> str:
        path, field = self._engine.version
        response = await self._client.get(path, timeout=LOOK_S)
        return str(response.raise_for_status().json()[field])

    async def _poll(self) -> None:
        """Read the engine's gauges now and then."""
        while True:
            with suppress(httpx.HTTPError, ValueError):
                response = await self._client.get(self._engine.metrics, timeout=LOOK_S)
                if response.status_code == 200:
                    self.stats = self._engine.stats(samples_of(response.text))
            await asyncio.sleep(STATS_EVERY_S)


def samples_of(text: str) -> dict[str, float]:
    """The samples of an exposition in Prometheus' format, each summed over its labels."""
    samples: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        samples[name] = samples.get(name, 0.0) + float(value)
    return samples


def _message(body: bytes) -> str:
    """The message of an error's body, or its beginning where it is no JSON."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace")[:500]
    return _error_in(answer)[:500]


def _error_in(answer: object) -> str:
    """The message of an answer that is an error, in the forms that engines have."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
