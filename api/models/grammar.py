"""Checks a request's grammar before it is enqueued: it is compiled in another process, with the leaders' limits."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import msgspec
import structlog

from api.chat.tokens import Vocabulary
from api.schemas.generation import RequestedGrammar
from control.confinement import ConfinedFailure, ConfinedProcess, TooSlow
from control.errors import RequestError
from control.messages import Grammar, ModelAssets
from control.text.grammar_check import GrammarTokens, Task, Verdict

log = structlog.stdlib.get_logger(__name__)

LONGEST_S = 2.0
"""Of one compilation; ordinary ones take a millisecond."""
PROCESSES = 2
_MOST_VERDICTS = 1024
"""Verdicts that are remembered."""

_decode = msgspec.json.Decoder(Verdict).decode

Key = tuple[bytes, Grammar]


def grammar_tokens(vocabulary: Vocabulary, assets: ModelAssets) -> bytes:
    """The characters of a vocabulary that a grammar can name, as the checking process reads them."""
    added = vocabulary.added_tokens()
    single = vocabulary.single_bytes()
    size = max([assets.vocab_size - 1, *added, *single, *assets.eos_ids]) + 1
    return msgspec.json.encode(GrammarTokens(size, single, added, assets.eos_ids))


class GrammarChecks:
    """The verdicts of one API process, and the processes that find them."""

    def __init__(self, longest_s: float = LONGEST_S, processes: int = PROCESSES) -> None:
        self._children = [ConfinedProcess("control.text.grammar_check", deadline_s=longest_s) for _ in range(processes)]
        self._free = asyncio.LifoQueue[ConfinedProcess]()
        for child in self._children:
            self._free.put_nowait(child)
        self._longest_s = longest_s
        self._verdicts: OrderedDict[Key, Verdict] = OrderedDict()

    async def check(self, constraint: RequestedGrammar, tokens: bytes) -> Grammar:
        """The grammar as it is to be enqueued. Raises RequestError in the library's words for one that is refused."""
        key = (tokens, constraint.grammar)
        verdict = self._verdicts.get(key)
        if verdict is None:
            child = await self._free.get()
            try:
                verdict = self._verdicts.get(key) or await child.run(
                    _judge, child, constraint.grammar, tokens, self._longest_s
                )
            finally:
                self._free.put_nowait(child)
            self._verdicts[key] = verdict
            if len(self._verdicts) > _MOST_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(key)
        if verdict.grammar is None:
            raise RequestError(
                f"'{constraint.param}' can't be served: {verdict.refusal}.",
                param=constraint.param,
                code="invalid_grammar",
            )
        return verdict.grammar

    async def stop(self) -> None:
        """End the processes; no request waits for one any more."""
        for child in self._children:
            child.close()


def _judge(child: ConfinedProcess, grammar: Grammar, tokens: bytes, longest_s: float) -> Verdict:
    try:
        return _decode(child.ask(msgspec.json.encode(Task(grammar, msgspec.Raw(tokens)))))
    except TooSlow:
        log.warning("a grammar took too long", action="refuse_grammar", kind=grammar.kind, size=len(grammar.text))
        return Verdict(refusal=f"to compile it takes longer than {longest_s:g} s; simplify it")
    except ConfinedFailure:
        log.warning("a grammar ended its process", action="refuse_grammar", kind=grammar.kind, size=len(grammar.text))
        return Verdict(refusal="to compile it takes too much memory, or is too deeply nested; simplify it")
