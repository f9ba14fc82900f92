"""The times of one answer, as this process saw them: Ollama's durations, and llama.cpp's `timings`."""

from __future__ import annotations

import time
from typing import Any

from api.schemas.view import View

_NS_PER_MS = 1_000_000


class Durations:
    """Nanoseconds of one answer, from the moment at which its request came."""

    def __init__(self, view: View) -> None:
        self._received = (view.received_ms or 1000 * view.created) * _NS_PER_MS
        self.load = self.since_received()
        """Until the request was queued."""
        self._first: int | None = None

    def since_received(self) -> int:
        return max(0, time.time_ns() - self._received)

    def note_token(self) -> None:
        """A token is there; the first one counts."""
        if self._first is None:
            self._first = self.since_received()

    def fields(self) -> dict[str, Any]:
        """As they are at the answer's end."""
        total = self.since_received()
        first = min(total, self._first if self._first is not None else total)
        return {
            "total_duration": total,
            "load_duration": self.load,
            "prompt_eval_duration": max(0, first - self.load),
            "eval_duration": total - first,
        }

    def timings(self, prompt: int, cached: int, generated: int) -> dict[str, float]:
        """llama.cpp's `timings`, so far; `cached` of the tokens of the prompt were not computed. The first token comes
        with the prompt, so it counts in no rate."""
        fields = self.fields()
        cached = min(cached, prompt)
        return {
            "cache_n": cached,
            **_times("prompt", prompt - cached, prompt - cached, fields["prompt_eval_duration"]),
            **_times("predicted", generated, max(0, generated - 1), fields["eval_duration"]),
        }


def _times(name: str, count: int, timed: int, nanoseconds: int) -> dict[str, float]:
    """Tokens of a part of the work, and the time that `timed` of them took."""
    ms = nanoseconds / _NS_PER_MS
    return {
        f"{name}_n": count,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / timed if timed else 0.0,
        f"{name}_per_second": 1000 * timed / ms if ms else 0.0,
    }
