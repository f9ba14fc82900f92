"""The forms of a model's reasoning and calls, from its chat template and its special tokens."""

from __future__ import annotations

from dataclasses import dataclass

from api.chat.reading.llama3 import PYTHON_TAG
from api.chat.tokens import Vocabulary
from api.schemas.view import CallFormat, Thinking

_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True)
class Forms:
    """None: the model has no such thing, or writes it in a form that is not known here."""

    calls: CallFormat | None = None
    thinking: Thinking | None = None


def forms_of(template: str | None, vocabulary: Vocabulary, calls: CallFormat | None = None) -> Forms:
    """The forms in the template, or of marks that only the tokenizer has; `calls`, if given, is that of calls."""
    source = template or ""
    return Forms(calls or _calls(source, vocabulary), _thinking(source, vocabulary))


def _calls(source: str, vocabulary: Vocabulary) -> CallFormat | None:
    if "<function=" in source and "<parameter=" in source:
        return "qwen_xml"
    if "<tool_call>" in source:
        return "hermes"
    if PYTHON_TAG in source or ("tools" in source and ("ipython" in source or vocabulary.knows(PYTHON_TAG))):
        return "llama3"
    return None


def _thinking(source: str, vocabulary: Vocabulary) -> Thinking | None:
    for start, end in _THINKING:
        if start in source or end in source or (vocabulary.knows(start) and vocabulary.knows(end)):
            return Thinking(start, end)
    return None
