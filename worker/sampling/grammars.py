"""A leader's grammars: compiled beside the steps, kept, and copied for every choice that one constrains."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import structlog
from llguidance import LLMatcher, LLTokenizer

from control.errors import GrammarRefused
from control.messages import Grammar
from control.text.grammar import compile_grammar
from worker.scheduling.constraint import Constraint
from worker.scheduling.sequence import Sequence

log = structlog.get_logger()

_KEPT = 256
_THREADS = 2

Compiled = LLMatcher | str
"""A matcher at the beginning of its grammar, or the reason why there is none."""


class Grammars:
    """Compiles each grammar once. `ready` is for the step loop and never waits. `vocabulary` begins to make the
    library's form of the vocabulary; it is called once."""

    def __init__(self, vocabulary: Callable[[], Future[LLTokenizer]], eos_ids: list[int]) -> None:
        self._begin = vocabulary
        self._eos = eos_ids
        self._tokenizer: Future[LLTokenizer] | None = None
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._compiled: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()

    def prepare(self) -> Future[LLTokenizer]:
        """Begin to make the library's form of the vocabulary, if no one has yet. Other threads stop meanwhile."""
        if self._tokenizer is None:
            self._tokenizer = self._begin()
        return self._tokenizer

    def ready(self, grammar: Grammar | None) -> bool:
        """True if its matcher is there; begins to make it where it is not."""
        if grammar is None:
            return True
        if grammar not in self._compiled:
            self._compiled[grammar] = self._pool.submit(self._compile, grammar, self.prepare())
            self._trim()
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].done()

    def wait(self, seconds: float) -> None:
        """Return once one more is ready, or after `seconds`."""
        wait([future for future in self._compiled.values() if not future.done()], seconds, FIRST_COMPLETED)

    def constrain(self, sequence: Sequence) -> None:
        """Give a choice its own matcher, in the state after what it has put out; its grammar must be ready."""
        grammar = sequence.sampling.grammar
        sequence.constraint = None
        if grammar is not None:
            compiled = self._compiled[grammar].result()
            size = 0 if isinstance(compiled, str) else self.prepare().result().vocab_size
            sequence.constraint = Constraint(compiled, self._eos, size, sequence.sampling)
            sequence.constraint.replay(sequence.output)

    def _compile(self, grammar: Grammar, tokenizer: Future[LLTokenizer]) -> Compiled:
        try:
            return compile_grammar(grammar, tokenizer.result())
        except GrammarRefused as error:
            return str(error)
        except Exception as error:
            log.exception("could not compile a grammar", kind=grammar.kind, action="compile_grammar")
            return f"{type(error).__name__}: {error}"

    def _trim(self) -> None:
        surplus = max(0, len(self._compiled) - _KEPT)
        for grammar in [grammar for grammar, future in self._compiled.items() if future.done()][:surplus]:
            del self._compiled[grammar]
