"""Tools wait for conditions; and the tests."""

from __future__ import annotations

import pytest

from ops.common.waiting import NotInTime, pause_after, until
from tests import waiting


def test_until_returns_the_first_true_value() -> None:
    values = iter([0, None, "", "there", "later"])
    assert until(lambda: next(values), "a value", tick=0) == "there"


def test_until_names_what_did_not_come() -> None:
    with pytest.raises(NotInTime, match=r"^not within 0.01 s: the rank is ready$"):
        until(lambda: False, "the rank is ready", 0.01, tick=0)


def test_until_of_the_tests_shows_its_condition() -> None:
    never_true = False
    with pytest.raises(TimeoutError, match="never_true"):
        waiting.until(lambda: never_true, 0.01)


def test_the_last_pause_is_repeated() -> None:
    """Of two pauses the second follows every later failure."""
    assert [pause_after(failures, (0.1, 0.5)) for failures in (1, 2, 3, 9)] == [0.1, 0.5, 0.5, 0.5]
