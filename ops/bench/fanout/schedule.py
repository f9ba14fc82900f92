"""Which client's next token is due when: the same for leaders behind Redis and for a stream without any."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

TEXT = (
    "A lighthouse keeper counted the ships that passed before the storm, wrote each name down, "
    "and then, when the wind had gone, she lit the lamp again and waited for the morning. "
)
"""The text of every stream, repeated."""
CALL = '<tool_call>\n{"name": "write", "arguments": {"text": "'
"""As the demonstration model begins a call; the text follows."""
TOOL = {
    "type": "function",
    "function": {"name": "write", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}


@dataclass(frozen=True, slots=True)
class Load:
    """`clients` streams of `rate` tokens a second each, served by `replicas` groups that step in turn."""

    clients: int
    replicas: int
    rate: float
    tokens: int
    """Of one answer; then its client asks again."""
    calls: bool = False
    """Each answer is the beginning of one call, whose argument is the text."""

    @property
    def slots(self) -> int:
        """Most streams of one replica."""
        return -(-self.clients // self.replicas)

    @property
    def pause(self) -> float:
        """Seconds between the steps of one replica and the next one."""
        return 1 / (self.rate * self.replicas)

    def first_answer(self, client: int) -> int:
        """Tokens of a client's first answer: shorter for most, so that the answers end one after the other."""
        return max(2, self.tokens * (client + 1) // self.clients)

    def ticks(self) -> Iterator[tuple[int, float]]:
        """The replica whose step is due, and by how many seconds it is late; a late one is not left out."""
        due = time.monotonic()
        while True:
            for replica in range(self.replicas):
                due += self.pause
                wait = due - time.monotonic()
                if wait > 0:
                    time.sleep(wait)
                yield replica, max(0.0, -wait)
