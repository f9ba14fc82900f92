"""`python -m control.text.grammar_check`: compiles grammars for an API process; a hostile one harms only this.

Messages are JSON: a Task is answered by a Verdict (`control.confinement`).
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
from llguidance import LLTokenizer

from control.confinement import answer_messages
from control.errors import GrammarRefused
from control.messages import Grammar
from control.text.grammar import compile_grammar, converted, error_of, tokenizer_of
from control.text.vocabulary import TokenBytes

_MEMORY_BYTES = 2 << 30
_STACK_BYTES = 1 << 20
"""Less than any thread has that compiles the same grammar for a leader."""


class GrammarTokens(msgspec.Struct, frozen=True):
    """Of a vocabulary what a grammar can name, by id: the single bytes, and the added tokens with their names."""

    size: int
    single: dict[int, bytes]
    added: dict[int, str]
    eos: list[int]

    @property
    def tokens(self) -> TokenBytes:
        texts = [b""] * self.size
        for token, text in self.single.items():
            texts[token] = text
        for token, name in self.added.items():
            texts[token] = name.encode()
        return TokenBytes(texts, sorted(self.added))


class Task(msgspec.Struct, frozen=True):
    grammar: Grammar
    tokens: msgspec.Raw
    """GrammarTokens as JSON."""


class Verdict(msgspec.Struct, frozen=True):
    """The grammar as it is to be enqueued, or why it is refused."""

    grammar: Grammar | None = None
    refusal: str = ""


def judge(task: Task) -> Verdict:
    """Compile the grammar, and ask it for its first tokens."""
    try:
        grammar = converted(task.grammar)
        matcher = compile_grammar(grammar, _tokenizer(bytes(task.tokens)))
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarRefused(error_of(matcher))
    except GrammarRefused as error:
        return Verdict(refusal=str(error))
    return Verdict(grammar)


@lru_cache(maxsize=8)
def _tokenizer(tokens: bytes) -> LLTokenizer:
    vocabulary = msgspec.json.decode(tokens, type=GrammarTokens)
    return tokenizer_of(vocabulary.tokens, vocabulary.eos)


def main() -> None:
    """Answer until the parent closes the pipe or ends."""
    decode = msgspec.json.Decoder(Task).decode
    answer_messages(
        lambda message: msgspec.json.encode(judge(decode(message))),
        "furrow-grammar",
        memory_bytes=_MEMORY_BYTES,
        stack_bytes=_STACK_BYTES,
    )


if __name__ == "__main__":
    main()
