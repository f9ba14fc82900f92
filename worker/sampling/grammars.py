"""A leader's grammars, and the forms of a model's vocabulary that they need."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import structlog
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from control.errors import GrammarRefused, ModelFilesError
from control.messages import Grammar, ModelAssets
from control.process import give_back_memory
from control.text.grammar import compile_grammar, tokenizer_of
from control.text.text_stream import Decode
from control.text.tokenizer_check import decoding_only
from control.text.vocabulary import read_token_bytes
from worker.scheduling.constraint import Constraint
from worker.scheduling.sequence import Sequence

log = structlog.get_logger()


# The forms of a model's vocabulary that a leader needs: made by the leader, or before it by the standby that forks it.
#
# The form for grammars takes half a second of a large vocabulary, in which no other Python thread runs. So a leader
# makes it when it is idle or a grammar needs it. A forked leader shares the standby's memory.


@dataclass(frozen=True)
class Vocabulary:
    """Ids to text, and the form in which the library of grammars takes a vocabulary: each call makes it in a thread,
    unless it was prepared."""

    decode: Decode
    for_grammars: Callable[[], Future[LLTokenizer]]


_prepared: dict[str, tuple[bytes, Vocabulary]] = {}
"""By the name that `prepare` was given: the digest of the assets, and what was made of them."""


def prepare(name: str, assets: ModelAssets) -> None:
    """Make the vocabulary now, for the `vocabulary_of` of processes that are forked from this one. Raises any error."""
    form = Future[LLTokenizer]()
    _fulfil(form, assets)
    form.result()
    _prepared[name] = _digest(assets), Vocabulary(_decode_of(assets), lambda: form)


def keep_prepared(names: set[str]) -> None:
    """Release the vocabularies that were prepared under other names."""
    for name in _prepared.keys() - names:
        del _prepared[name]


def vocabulary_of(assets: ModelAssets) -> Vocabulary:
    """The one that was prepared, if it was of the same assets; else a new one. Raises ModelFilesError."""
    if _prepared:
        digest = _digest(assets)
        for made_of, vocabulary in _prepared.values():
            if made_of == digest:
                return vocabulary

    def for_grammars() -> Future[LLTokenizer]:
        form = Future[LLTokenizer]()
        threading.Thread(target=_fulfil, args=(form, assets), name="vocabulary", daemon=True).start()
        return form

    return Vocabulary(_decode_of(assets), for_grammars)


def _digest(assets: ModelAssets) -> bytes:
    """Of all that a vocabulary is made of. It takes some hundredths of a second for a large one."""
    parts = f"{assets.vocab_size} {assets.eos_ids} {assets.tokenizer_json}"
    return hashlib.sha256(parts.encode()).digest()


def _decode_of(assets: ModelAssets) -> Decode:
    try:
        tokenizer = Tokenizer.from_str(decoding_only(assets.tokenizer_json))
    except Exception as error:  # the library raises no kind of its own
        raise ModelFilesError(
            f"No tokenizer can be made of tokenizer.json: {error}. Put the published one there "
            "(`tokenizer.save_pretrained(folder)`), or load another model."
        ) from error
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def _fulfil(future: Future[LLTokenizer], assets: ModelAssets) -> None:
    try:
        tokens = read_token_bytes(assets.tokenizer_json, assets.vocab_size)
        future.set_result(tokenizer_of(tokens, assets.eos_ids))
    except BaseException as error:
        future.set_exception(error)
    give_back_memory()  # the file and its entries took several times what is kept


# A leader's grammars: compiled beside the steps, kept, and copied for every choice that one constrains.


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
