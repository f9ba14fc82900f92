"""A thread that runs one call while its owner does something else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """A thread for calls, one at a time. It is a daemon: a call that never returns keeps no process alive. Two queues,
    because a future costs several times as much, and a leader sends a call with every short step."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
        self._answers: SimpleQueue[T | Exception] = SimpleQueue()
        # A thread begins without its parent's context: model, rank and epoch belong on this one's lines too.
        Thread(target=copy_context().run, args=(self._run,), name=name, daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._answers.put(call())
            except Exception as error:  # raised where the answer is asked for
                self._answers.put(error)

    def send(self, call: Callable[[], T]) -> None:
        self._calls.put(call)

    def answer(self) -> T:
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, seconds: float) -> None:
        """Let the call under way end, `seconds` at most, and forget its answer."""
        with suppress(Empty):
            self._answers.get(timeout=seconds)

    def close(self) -> None:
        """The thread ends after the call under way."""
        self._calls.put(None)
