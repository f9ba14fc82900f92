"""Child processes that answer one message at a time within bounds of time and memory, for work on hostile input.

A message and its answer are bytes behind their length (4 bytes, big-endian). A child that is late is killed; one that
wants more memory than it has ends. The next message starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, ParamSpec, TypeVar

from control.process import child_environment, die_with_parent, name_process, python_command

P = ParamSpec("P")
T = TypeVar("T")

START_S = 30.0
"""For the child's imports, on a busy machine."""
MOST_ANSWER_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 20
_INHERITED = ("FURROW_PARENT", "TOKENIZERS_PARALLELISM", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TZ")


class ConfinedFailure(Exception):
    """The work was not done; the child was killed, or has ended."""


class TooSlow(ConfinedFailure):
    """The child was killed because it was late."""


class Ended(ConfinedFailure):
    """The child ended: it wanted more memory or stack than it has, or a library aborted. `status`: its exit status,
    negative for the signal that ended it; None where none was started."""

    def __init__(self, why: str, status: int | None) -> None:
        super().__init__(why)
        self.status = status


class TooLarge(ConfinedFailure):
    """The child was killed because its answer has too many bytes."""


class Abandoned(Exception):
    """The child was killed because nobody waits for its answer any more; raised in the thread of the work only."""


class ConfinedProcess:
    """A child, started when it is needed first and again after it ended, and the thread that waits for it.

    The thread starts the child: the kernel ends a child with the thread that started it.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        deadline_s: float,
        greeting: bytes | None = None,
        most_answer_bytes: int = MOST_ANSWER_BYTES,
    ) -> None:
        """`greeting` is the first message to each child; its answer is not kept."""
        self._module = module
        self._arguments = arguments
        self._deadline_s = deadline_s
        self._greeting = greeting
        self._most_answer_bytes = most_answer_bytes
        self._thread = ThreadPoolExecutor(1, module.rpartition(".")[2])
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        """Guards the two that follow."""
        self._served: object | None = None
        """The caller whose work is done now."""
        self._abandoned = False
        """True if that caller has gone, and the child was killed."""

    @property
    def pid(self) -> int | None:
        """The child that runs now."""
        return None if self._process is None else self._process.pid

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(…)` in the thread, where it may call `ask`; one work after another. A cancellation kills the child that
        works for the caller."""
        future = self._thread.submit(self._work, caller := object(), lambda: work(*args, **kwargs))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._lock:
                if self._served is caller and self._process is not None:
                    self._process.kill()
                    self._abandoned = True
            raise

    def _work(self, caller: object, work: Callable[[], T]) -> T:
        with self._lock:
            self._served = caller
        try:
            return work()
        finally:
            with self._lock:
                self._served = None
                if self._abandoned:
                    self._abandoned = False
                    self._kill()

    def ask(self, message: bytes, deadline_s: float | None = None) -> bytes:
        """The child's answer. Only in the thread of `run`. Raises TooSlow, Ended, TooLarge, Abandoned."""
        until = time.monotonic() + (self._deadline_s if deadline_s is None else deadline_s)
        try:
            if self._process is None:
                began = time.monotonic()
                self._process = self._start()
                until += time.monotonic() - began
            return self._exchange(self._process, message, until)
        except (OSError, EOFError) as error:
            status = self._kill()
            with self._lock:
                abandoned = self._abandoned
            if abandoned:
                raise Abandoned from error
            if isinstance(error, TimeoutError):
                raise TooSlow(repr(error)) from error
            raise Ended(repr(error), status) from error
        except BaseException:
            self._kill()  # what it would still answer belongs to nobody
            raise

    def close(self) -> None:
        """End the child, at once where it works; nothing may be asked any more."""
        with self._lock:
            if self._served is None:
                self._kill()
            elif self._process is not None:
                self._process.kill()  # the work that meets its end removes it
        self._thread.shutdown(wait=False)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*python_command(self._module), *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_environment(),
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            os.set_blocking(process.stdin.fileno(), False)
            os.set_blocking(process.stdout.fileno(), False)
            self._receive(process, time.monotonic() + START_S)
            if self._greeting is not None:
                self._exchange(process, self._greeting, time.monotonic() + START_S)
        except BaseException:
            _end(process)
            raise
        return process

    def _exchange(self, process: subprocess.Popen[bytes], message: bytes, until: float) -> bytes:
        assert process.stdin is not None
        for part in (_LENGTH.pack(len(message)), message):
            rest = memoryview(part)
            while rest:
                _wait(process.stdin, select.POLLOUT, until)
                rest = rest[os.write(process.stdin.fileno(), rest) :]
        return self._receive(process, until)

    def _receive(self, process: subprocess.Popen[bytes], until: float) -> bytes:
        (length,) = _LENGTH.unpack(_read(process, _LENGTH.size, until))
        if length > self._most_answer_bytes:
            raise TooLarge(f"an answer of {length} bytes")
        return _read(process, length, until)

    def _kill(self) -> int | None:
        process = self._process
        self._process = None
        return None if process is None else _end(process)


def _environment() -> dict[str, str]:
    """Of a child: hostile input is to find no password there."""
    everything = child_environment(TOKENIZERS_PARALLELISM="false")
    return {name: everything[name] for name in _INHERITED if name in everything}


def _read(process: subprocess.Popen[bytes], length: int, until: float) -> bytes:
    assert process.stdout is not None
    read = bytearray()
    while len(read) < length:
        _wait(process.stdout, select.POLLIN, until)
        piece = os.read(process.stdout.fileno(), min(length - len(read), _READ_BYTES))
        if not piece:
            raise EOFError("the child has ended")
        read += piece
    return bytes(read)


def _wait(pipe: IO[bytes], event: int, until: float) -> None:
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError


def _end(process: subprocess.Popen[bytes]) -> int:
    """Returns its exit status, also where it had ended by itself."""
    process.kill()
    status = process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    return status


def answer_messages(
    answer: Callable[[bytes], bytes], name: str, *, memory_bytes: int, stack_bytes: int | None = None
) -> None:
    """The child's side: answer until the parent closes the pipe or ends. An exception of `answer` ends the child."""
    die_with_parent()
    name_process(name)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if stack_bytes is not None:
        resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, stack_bytes))
    messages = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    _write(answers, b"")
    with contextlib.suppress(MemoryError):  # it is the end, without a traceback in the parent's log
        while len(head := messages.read(_LENGTH.size)) == _LENGTH.size:
            _write(answers, answer(messages.read(*_LENGTH.unpack(head))))


def _write(answers: IO[bytes], answer: bytes) -> None:
    answers.write(_LENGTH.pack(len(answer)))
    answers.write(answer)
    answers.flush()
