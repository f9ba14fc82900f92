"""The pause before the next epoch when epochs keep ending in their first step: a fault that repeats must not spin."""

from __future__ import annotations

FIRST_S = 0.1
LONGEST_S = 5.0


class Backoff:
    """Doubles from epoch to epoch; one that completed a step, or ended for another reason, starts it over."""

    def __init__(self) -> None:
        self._fruitless = 0

    def after(self, *, steps: int, failed: bool) -> float:
        """Seconds to wait after an epoch that completed `steps` steps and ended in a step that `failed`."""
        if steps or not failed:
            self._fruitless = 0
            return 0.0
        pause = min(FIRST_S * 2**self._fruitless, LONGEST_S)
        self._fruitless += 1
        return pause
