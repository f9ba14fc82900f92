"""URLs of Redis: what is shown of them, and which are refused."""

from __future__ import annotations

import pytest

from control.errors import SettingsError
from control.redis.clients import connect
from control.redis.urls import address, redacted


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://user:p%40ss@host/1", "rediss://user:***@host/1"),
        ("unix://:secret@/run/redis.sock?db=2", "unix://:***@/run/redis.sock?db=2"),
        ("redis+sentinel://:secret@h1:1,h2:2/farm", "redis+sentinel://:***@h1:1,h2:2/farm"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    """Everything else of the URL is."""
    assert redacted(url) == shown


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis://:secret@host:7000/3", "redis://host:7000/3"),
        ("rediss://host", "rediss://host:6379/0"),
        ("unix://:secret@/run/redis.sock?db=2", "unix:///run/redis.sock?db=2"),
        ("redis+sentinel://:secret@h1,h2:7/farm/3", "redis+sentinel://h1:26379,h2:7/farm/3"),
        ("rediss+cluster://:secret@h1,[::1]:7", "rediss+cluster://h1:6379,::1:7"),
    ],
)
def test_a_client_is_named_by_where_it_leads(url: str, named: str) -> None:
    """The name is a URL without credentials."""
    client = connect(url)
    assert address(client) == named
    client.close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://:secret@host", "http"),
        ("localhost:6379", "localhost"),
        ("redis+sentinel://:secret@h1,h2", "must end with the primary's name"),
        ("redis+sentinel://:secret@h1,h2/name/none", "must end with the primary's name"),
        ("redis+sentinel://:secret@h1:port,h2/name", "can't be read"),
        ("redis+sentinel:///name", "names no host"),
        ("redis+cluster://:secret@h1,h2/3", "a Cluster has only 0"),
        ("redis://:secret@host:port/0", "port"),
        ("unix://", "names no socket"),
    ],
)
def test_other_urls_are_refused_by_name(url: str, reason: str) -> None:
    """The message shows what is wrong and what is accepted, and no password."""
    with pytest.raises(SettingsError, match=reason) as refused:
        connect(url)
    assert "secret" not in str(refused.value)
