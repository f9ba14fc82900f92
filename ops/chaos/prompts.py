"""The clients' requests: a few prompts, greedy and sampled, of different lengths, each with a fixed seed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

QUESTIONS = (
    "Count from 1 to 100.",
    "Count from 7 to 90.",
    "Tell me about the farm.",
    "What does a leader do when a rank of its group dies?",
    "List the letters of the alphabet.",
    "Repeat: token by token, row by row, each in its own furrow.",
)


@dataclass(frozen=True, slots=True)
class Question:
    """One request body, sent again and again: the answer is a function of it."""

    name: str
    body: bytes


def questions(model: str, seed: int, length: int, count: int) -> list[Question]:
    """`count` different requests of `length` tokens at most and at least half of that: even ones greedy, odd ones
    sampled. Three in four go on past the model's own end, so that every stream is long."""
    draw = random.Random(seed)
    made: list[Question] = []
    for index in range(count):
        sampled = index % 2 == 1
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": QUESTIONS[index // 2 % len(QUESTIONS)]}],
            "max_tokens": draw.randint((length + 1) // 2, length),
            "temperature": draw.choice((0.7, 1.0, 1.3)) if sampled else 0,
            "seed": draw.getrandbits(32),
            "ignore_eos": index % 4 != 2,
            "logprobs": index % 3 == 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            # A client whose API died may take its time to find the other.
            "on_disconnect": 120,
        }
        if sampled:
            body["top_p"] = draw.choice((0.9, 1.0))
        name = f"{index}: {'sampled' if sampled else 'greedy'}, {body['max_tokens']} tokens"
        made.append(Question(name, json.dumps(body).encode()))
    return made
