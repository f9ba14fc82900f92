"""One question with its right answers, the split into training and held-out questions, and small text tools."""

import hashlib
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

HELD_OUT_SHARE = 12
"""One key in this many is never trained on."""


@dataclass(frozen=True, slots=True)
class Example:
    """A user's prompt and every answer that counts as right.

    `key` names the question without its dress (capitals, please, punctuation), so that a held-out question can't slip
    into the training text in another dress.
    """

    task: str
    prompt: str
    answers: tuple[str, ...]
    key: str

    @property
    def held_out(self) -> bool:
        """True if the training text leaves this question out; a pure function of its task and key."""
        digest = hashlib.sha256(f"{self.task}:{self.key}".encode()).digest()
        return int.from_bytes(digest[:4]) % HELD_OUT_SHARE == 0


_GROUP = re.compile(r"\(([^()]*)\)")


def expand(pattern: str) -> list[str]:
    """Every sentence of a pattern such as `(how do i|how can i) see the (queue|line)`; groups do not nest."""
    parts = _GROUP.split(pattern)
    choices = [part.split("|") if index % 2 else [part] for index, part in enumerate(parts)]
    return [" ".join("".join(combination).split()) for combination in itertools.product(*choices)]


_OPENERS = ("please ", "hey, ", "ok, ", "now ", "quick question: ", "please tell me: ", "hi, ", "so, ", "well, ")
_CLOSERS = (", please", " please", " for me", " now", ", thanks")


def dress(rng: random.Random, core: str, mark: str = "?") -> str:
    """The core question as a person may type it: other capitals, a polite word, the end mark there or not."""
    text = core
    roll = rng.random()
    if roll < 0.12:
        text = rng.choice(_OPENERS) + text
    elif roll < 0.2:
        text += rng.choice(_CLOSERS)
    if rng.random() < 0.7:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.75:
        text += mark
    return text


def ask(
    rng: random.Random, task: str, core: str, answers: str | Sequence[str], *, key: str = "", mark: str = "?"
) -> Example:
    """An example whose key is its core question, unless the task has a stricter one (such as a pair of numbers)."""
    accepted = (answers,) if isinstance(answers, str) else tuple(answers)
    return Example(task, dress(rng, core, mark), accepted, key or core.lower())
