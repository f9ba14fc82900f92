"""What a leader remembers of an absence of Redis."""

from __future__ import annotations

from typing import Any, cast

import pytest

from control.errors import RedisUnavailable
from control.lease import Lease
from worker import exchange as exchange_module
from worker.exchange import Exchange


def test_after_an_absence_the_next_claim_adopts_and_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that had to be repeated is told once; one that got through at once is not."""
    monkeypatch.setattr(exchange_module, "AWAY_S", 0.0)
    exchange = Exchange(cast(Any, None), cast(Any, None), Lease("m", "r0", "one", 1), lambda: None)
    outcomes = [RedisUnavailable("away"), "answer", "answer"]

    def attempt() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with exchange:
        assert exchange.hold(attempt) == "answer"
        assert [exchange.was_away(), exchange.was_away()] == [True, False]
        assert exchange.hold(attempt) == "answer"
        assert not exchange.was_away()
