"""The rule when a key is asked for."""

from __future__ import annotations

import pytest

from control.errors import SettingsError
from control.operations.options import asks_for_key, why_asked


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    """Unless one is asked for."""
    assert not asks_for_key(host, (), keys=False, no_auth=False)
    assert asks_for_key(host, (), keys=True, no_auth=False)
    assert asks_for_key(host, ("k",), keys=False, no_auth=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "farm.example"])
def test_another_host_requires_a_key_without_no_auth(host: str) -> None:
    """Unless the operator says that they don't."""
    assert asks_for_key(host, (), keys=False, no_auth=False)
    assert not asks_for_key(host, (), keys=False, no_auth=True)


def test_both_is_a_contradiction() -> None:
    """Told by the option that was given."""
    with pytest.raises(SettingsError, match="--api-key"):
        asks_for_key("::1", ("k",), keys=False, no_auth=True)
    with pytest.raises(SettingsError, match="--keys"):
        asks_for_key("::1", (), keys=True, no_auth=True)


def test_the_operator_is_told_what_to_do() -> None:
    """Why, how many keys there are, and the command that makes one."""
    reason = why_asked("0.0.0.0", 0, " --redis URL")
    assert "0.0.0.0" in reason and "`furrow keys create --redis URL`" in reason and "--no-auth" in reason
    assert "elsewhere" not in why_asked("::1", 1) and "`furrow keys list`" in why_asked("::1", 1)
