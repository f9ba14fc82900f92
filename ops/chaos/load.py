"""A constant number of streams: clients that resume, in a thread of their own, each with one stream after another.

A client never gives up: a stream that is cut is resumed where it ended, on either API process. It asks a few prompts,
greedy and sampled, of different lengths, each with a fixed seed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ops.chaos.checker import Transcript, findings
from ops.chaos.errors import ChaosError
from ops.common.waiting import pause_after
from ops.harness.client import CHAT, Base, Response, request

SILENCE_LIMIT_S = 30.0
"""Without a byte, not even a keep-alive, the connection counts as broken."""
LIMIT_S = 600.0
"""For a whole stream."""
PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)


QUESTIONS = (
    "Count from 1 to 100.",
    "Count from 7 to 90.",
    "Tell me about the farm.",
    "What does a leader do when a rank of its group dies?",
    "List the letters of the alphabet.",
    "Repeat: token by token, row by row, each in its own furrow.",
)


@dataclass(frozen=True, slots=True)
class Question:
    """One request body, sent again and again: the answer is a function of it."""

    name: str
    body: bytes


def questions(model: str, seed: int, length: int, count: int) -> list[Question]:
    """`count` different requests of `length` tokens at most and at least half of that: even ones greedy, odd ones
    sampled. Three in four go on past the model's own end, so that every stream is long."""
    draw = random.Random(seed)
    questions: list[Question] = []
    for index in range(count):
        sampled = index % 2 == 1
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": QUESTIONS[index // 2 % len(QUESTIONS)]}],
            "max_tokens": draw.randint((length + 1) // 2, length),
            "temperature": draw.choice((0.7, 1.0, 1.3)) if sampled else 0,
            "seed": draw.getrandbits(32),
            "ignore_eos": index % 4 != 2,
            "logprobs": index % 3 == 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            # A client whose API died may take its time to find the other.
            "on_disconnect": 120,
        }
        if sampled:
            body["top_p"] = draw.choice((0.9, 1.0))
        name = f"{index}: {'sampled' if sampled else 'greedy'}, {body['max_tokens']} tokens"
        questions.append(Question(name, json.dumps(body).encode()))
    return questions


_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class Attempt:
    """One stream from its first request to its end. Times are of the monotonic clock."""

    question: Question
    transcript: Transcript
    began: float
    ended: float = 0.0
    heard: list[float] = field(default_factory=list)
    """When each event came."""
    connected: list[float] = field(default_factory=list)
    """When each connection was tried."""
    refusals: dict[str, int] = field(default_factory=dict)
    """Why connections failed, broke, or were refused: each reason with its count."""


class Refused(Exception):
    """An answer that is not a stream; `final` where another try can't help."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status} {body.decode(errors='replace')[:300]}")
        self.status = status
        self.final = status not in (429, 500, 502, 503)


async def stream(
    bases: list[Base], question: Question, draw: random.Random, begun: Callable[[Attempt], object] = id
) -> Attempt:
    """Ask until the whole answer is there. Never raises for what the farm did: the transcript has it.

    `begun` is called with the attempt before anything is sent, for whoever wants to watch it.
    """
    attempt = Attempt(question, Transcript(), time.monotonic())
    begun(attempt)
    key = f"{draw.getrandbits(128):032x}"
    index = draw.randrange(len(bases))
    failures = 0
    try:
        async with asyncio.timeout(LIMIT_S):
            while not attempt.transcript.done and not attempt.transcript.errors:
                before = len(attempt.heard)
                await _connection(bases[index], attempt, key)
                failures = failures + 1 if len(attempt.heard) == before else 0
                index = (index + 1) % len(bases)
                if failures:
                    await asyncio.sleep(pause_after(failures, PAUSES_S))
    except TimeoutError:
        attempt.transcript.errors.append(f"no end within {LIMIT_S:.0f} s: {attempt.refusals}")
    attempt.ended = time.monotonic()
    return attempt


async def _connection(base: Base, attempt: Attempt, key: str) -> None:
    """One connection, to its end or break."""
    transcript = attempt.transcript
    headers = {"content-type": "application/json", "authorization": "Bearer chaos", "idempotency-key": key}
    if transcript.last_id:
        headers["last-event-id"] = transcript.last_id
    attempt.connected.append(time.monotonic())
    broken = "cut"
    try:
        async with (
            asyncio.timeout(SILENCE_LIMIT_S) as silence,
            request(base, "POST", CHAT, body=attempt.question.body, headers=headers) as response,
        ):
            if response.status != 200:
                raise Refused(response.status, await response.read())
            await _read(response, attempt, silence)
    except Refused as refused:
        broken = f"refused: {refused}"
        if refused.final:
            transcript.errors.append(broken)
    except TimeoutError:
        broken = "silent"
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        broken = type(error).__name__
    if not transcript.done:
        attempt.refusals[broken] = attempt.refusals.get(broken, 0) + 1


async def _read(response: Response, attempt: Attempt, silence: asyncio.Timeout) -> None:
    transcript = attempt.transcript
    loop = asyncio.get_running_loop()
    async for event_id, data, _ in response.events():
        attempt.heard.append(time.monotonic())
        silence.reschedule(loop.time() + SILENCE_LIMIT_S)
        if data == b"[DONE]":
            transcript.done = True
            transcript.take(event_id)
            return
        chunk = _decode(data)
        if error := chunk.get("error"):
            transcript.errors.append(f"an error event: {error.get('code')}: {error.get('message', '')}")
            return
        if usage := chunk.get("usage"):
            transcript.usage = usage["completion_tokens"]
        for choice in chunk.get("choices") or [{}]:
            scores = (choice.get("logprobs") or {}).get("content") or ()
            text = choice.get("delta", {}).get("content") or ""
            transcript.take(event_id, text, [score["token"] for score in scores], choice.get("finish_reason"))


# --- the load ---------------------------------------------------------------------------------------------------------


END_WITHIN_S = 660.0


@dataclass(frozen=True, slots=True)
class Checked:
    """A stream that ended, and its errors."""

    attempt: Attempt
    findings: list[str]


class Load:
    """`expected` holds the undisturbed transcript of each question, by name."""

    def __init__(self, urls: list[str], questions: list[Question], streams: int, seed: int) -> None:
        self._bases = [Base.of(url) for url in urls]
        self._questions = questions
        self._streams = streams
        self._seed = seed
        self._running: dict[int, Attempt] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failure: BaseException | None = None
        self.expected: dict[str, Transcript] = {}
        self.checked: list[Checked] = []

    def record(self) -> None:
        """Ask every question once, undisturbed. Raises ChaosError if an answer fails."""

        async def ask_all() -> list[Attempt]:
            draw = random.Random(self._seed)
            return await asyncio.gather(*(stream(self._bases, question, draw) for question in self._questions))

        for attempt in asyncio.run(ask_all()):
            if wrong := findings(attempt.transcript, attempt.transcript):
                raise ChaosError(f"the undisturbed stream of question {attempt.question.name} failed: {wrong}")
            self.expected[attempt.question.name] = attempt.transcript

    def start(self) -> None:
        """Begin; `record` has been called."""
        self._thread = threading.Thread(target=self._main, name="load", daemon=True)
        self._thread.start()

    def stop(self, tend: Callable[[Callable[[], bool], str, float], object]) -> None:
        """Start no more streams, and wait for the end of all that run. `tend` waits for a condition, as Target.until.

        Raises the error that ended the load early.
        """
        self._stopping = True
        assert self._thread is not None
        thread = self._thread
        tend(lambda: not thread.is_alive(), "every stream has ended", END_WITHIN_S)
        if self._failure is not None:
            raise ChaosError(f"the load failed: {self._failure!r}") from self._failure

    def running(self, since: float) -> int:
        """Streams under way that have had an event after `since`."""
        return sum(bool(attempt.heard) and attempt.heard[-1] > since for attempt in list(self._running.values()))

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:  # handed to the thread that waits
            self._failure = error

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(self._streams):
                group.create_task(self._client(index))

    async def _client(self, index: int) -> None:
        """Ask one question after another, in an order of its own."""
        draw = random.Random(f"{self._seed} {index}")
        while not self._stopping:
            question = draw.choice(self._questions)
            attempt = await stream(self._bases, question, draw, lambda attempt: self._running.update({index: attempt}))
            del self._running[index]
            wrong = findings(attempt.transcript, self.expected[question.name])
            self.checked.append(Checked(attempt, wrong))


def longest_silence(attempt: Attempt, begin: float, end: float) -> float | None:
    """Seconds of the longest pause between two events that touches the time from `begin` to `end`; None where the
    stream was not under way then."""
    moments = [attempt.began, *attempt.heard]
    pauses = [after - before for before, after in itertools.pairwise(moments) if after > begin and before < end]
    return max(pauses, default=None)
