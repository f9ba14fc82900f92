"""Log entries are shown as text."""

from __future__ import annotations

import pytest

from control.messages import LogEntry, TokenLogprobs
from control.requests.token_log import decode_entries, encode_entry


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (LogEntry(1, 0, 42), "[1,0,42]"),
        (LogEntry(2, 1, 42, "stop", "token"), '[2,1,42,"stop","token"]'),
        (LogEntry(3, 0, None, "cancelled"), '[3,0,null,"cancelled"]'),
        (LogEntry(4, 0, 42, logprobs=TokenLogprobs(-0.5)), "[4,0,42,null,null,[-0.5,[]]]"),
        (LogEntry(5, 0, 42, "stop", ",null]"), '[5,0,42,"stop",",null]"]'),
        (LogEntry(1, 0, 42, cached=64), "[1,0,42,null,null,null,64]"),
        (LogEntry(6, 0, None), "[6,0,null]"),
    ],
)
def test_an_entry_is_short_and_comes_back(entry: LogEntry, text: str) -> None:
    """The absent tail is left out, and reading gives the entry again."""
    assert encode_entry(entry) == text
    assert decode_entries(f"[{text}]") == [entry]
