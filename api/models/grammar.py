"""Checks a request's grammar before it is enqueued: it is compiled in another process, with the leaders' limits."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress

import msgspec
import structlog

from api.chat.tokens import Vocabulary
from api.schemas.structured import Asked
from control.errors import RequestError
from control.messages import Grammar, ModelAssets
from control.process import child_environment, python_command
from control.text.grammar_check import Letters, Task, Verdict

log = structlog.stdlib.get_logger(__name__)

LONGEST_S = 2.0
"""Of one compilation; ordinary ones take a millisecond."""
PROCESSES = 2
_KNOWN = 1024
"""Verdicts that are remembered."""
_LINE_BYTES = 4 << 20

_decode = msgspec.json.Decoder(Verdict).decode

Key = tuple[bytes, Grammar]


def letters(vocabulary: Vocabulary, assets: ModelAssets) -> bytes:
    """The characters of a vocabulary that a grammar can name, as the checking process reads them."""
    added, single = vocabulary.added_tokens(), vocabulary.single_bytes()
    size = max([assets.vocab_size - 1, *added, *single, *assets.eos_ids]) + 1
    return msgspec.json.encode(Letters(size, single, added, assets.eos_ids))


class GrammarChecks:
    """The verdicts of one API process, and the processes that find them."""

    def __init__(self, longest_s: float = LONGEST_S, processes: int = PROCESSES) -> None:
        self._free = asyncio.LifoQueue[_Child]()
        for _ in range(processes):
            self._free.put_nowait(_Child(longest_s))
        self._known: OrderedDict[Key, Verdict] = OrderedDict()
        self._children = processes

    async def check(self, asked: Asked, letters: bytes) -> Grammar:
        """The grammar as it is to be enqueued. Raises RequestError in the library's words for one that is refused."""
        key = (letters, asked.grammar)
        verdict = self._known.get(key)
        if verdict is None:
            child = await self._free.get()
            try:
                verdict = self._known.get(key) or await child.judge(asked.grammar, letters)
            finally:
                self._free.put_nowait(child)
            self._known[key] = verdict
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if verdict.grammar is None:
            raise RequestError(
                f"'{asked.param}' can't be served: {verdict.refusal}.", param=asked.param, code="invalid_grammar"
            )
        return verdict.grammar

    async def stop(self) -> None:
        """End the processes; no request waits for one any more."""
        for _ in range(self._children):
            with suppress(asyncio.QueueEmpty):
                await self._free.get_nowait().end()


class _Child:
    """One process, started when it is needed first and again after it was ended."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._process: asyncio.subprocess.Process | None = None

    async def judge(self, grammar: Grammar, letters: bytes) -> Verdict:
        process = self._process = self._process or await _start()
        assert process.stdin is not None and process.stdout is not None
        line = b""
        try:
            process.stdin.write(msgspec.json.encode(Task(grammar, msgspec.Raw(letters))) + b"\n")
            line = await asyncio.wait_for(process.stdout.readline(), self._longest_s)
        except TimeoutError:
            log.warning("a grammar took too long", action="refuse_grammar", kind=grammar.kind, size=len(grammar.text))
            return Verdict(refusal=f"to compile it takes longer than {self._longest_s:g} s; simplify it")
        except ConnectionError:
            pass  # it has ended, which the empty line says too
        finally:
            # Also where the request was cancelled: its answer would be taken for the next one's.
            if not line:
                await self.end()
        if not line:
            log.warning(
                "a grammar ended its process", action="refuse_grammar", kind=grammar.kind, size=len(grammar.text)
            )
            return Verdict(refusal="to compile it takes too much memory, or is too deeply nested; simplify it")
        return _decode(line)

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _start() -> asyncio.subprocess.Process:
    """A process that is ready, so that its start is not counted as a grammar's time."""
    process = await asyncio.create_subprocess_exec(
        *python_command("control.text.grammar_check"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(),
        limit=_LINE_BYTES,
    )
    assert process.stdout is not None
    try:
        await process.stdout.readline()
    except BaseException:
        process.kill()
        raise
    return process
