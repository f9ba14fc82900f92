"""A constant number of streams: clients that resume, in a thread of their own, each with one stream after another."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ops.chaos.checker import Transcript, findings
from ops.chaos.client import Attempt, Question, stream
from ops.chaos.errors import ChaosError
from ops.harness.client import Base

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
