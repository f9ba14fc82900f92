"""Where the grammar of a constrained answer begins, and how such an answer is read."""

from __future__ import annotations

from api.chat.reading.how import Reading
from api.chat.tokens import Vocabulary
from control.errors import RequestError


def constrained(reading: Reading | None, param: str, vocabulary: Vocabulary) -> tuple[Reading | None, int | None]:
    """How an answer that `param` constrains is read, and the token behind which its grammar begins.

    The text is the grammar's from the first character on, and nothing else is looked for in it; only where the prompt
    has begun a reasoning, the answer ends that first. Raises RequestError where that end is no token.
    """
    thinking = reading.thinking if reading is not None else None
    if reading is None or thinking is None or not thinking.begun:
        return None, None
    if not vocabulary.knows(thinking.close):
        raise RequestError(
            f"This model's prompt begins with reasoning, whose end {thinking.close!r} is no token of its own, so "
            f"'{param}' can't be served behind it. Switch the reasoning off with 'reasoning_effort': 'none'.",
            param=param,
        )
    return Reading(thinking=thinking, marks=reading.marks), vocabulary.tokenizer.token_to_id(thinking.close)
