"""The times of one answer, as this process saw them: Ollama's durations, and llama.cpp's `timings`."""

from __future__ import annotations

import time

from api.schemas.answers import Timings
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

    def fields(self) -> dict[str, int]:
        """Ollama's durations, as they are at the answer's end."""
        total = self.since_received()
        first = min(total, self._first if self._first is not None else total)
        return {
            "total_duration": total,
            "load_duration": self.load,
            "prompt_eval_duration": max(0, first - self.load),
            "eval_duration": total - first,
        }

    def timings(self, prompt: int, cached: int, generated: int) -> Timings:
        """llama.cpp's `timings`, so far; `cached` of the tokens of the prompt were not computed. The first token comes
        with the prompt, so it counts in no rate."""
        fields = self.fields()
        cached = min(cached, prompt)
        computed = prompt - cached
        prompt_ms = fields["prompt_eval_duration"] / _NS_PER_MS
        predicted_ms = fields["eval_duration"] / _NS_PER_MS
        timed = max(0, generated - 1)
        return Timings(
            cache_n=cached,
            prompt_n=computed,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=prompt_ms / computed if computed else 0.0,
            prompt_per_second=1000 * computed / prompt_ms if prompt_ms else 0.0,
            predicted_n=generated,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=predicted_ms / timed if timed else 0.0,
            predicted_per_second=1000 * timed / predicted_ms if predicted_ms else 0.0,
        )
