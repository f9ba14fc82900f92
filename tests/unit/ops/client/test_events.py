"""Server-sent events are parsed in any parts."""

from __future__ import annotations

import pytest

from ops.client.events import Event, EventParser, EventReader, parsed

STREAM = b': queue position 2\nid: r:1.1\ndata: {"n":1}\n\n:\nevent: x\r\ndata:a\r\ndata:  b\r\n\r\ndata: [DONE]\n\n'
EVENTS = [
    Event("", b"", b": queue position 2\n"),
    Event("r:1.1", b'{"n":1}', b'id: r:1.1\ndata: {"n":1}\n\n'),
    Event("", b"", b":\n"),
    Event("", b"a\n b", b"event: x\r\ndata:a\r\ndata:  b\r\n\r\n"),
    Event("", b"[DONE]", b"data: [DONE]\n\n"),
]


@pytest.mark.parametrize("size", [1, 2, 7, len(STREAM)])
def test_parser_finds_every_event_and_comment_in_parts_of_any_size(size: int) -> None:
    """Ids, data over several lines, comments, and both ends of lines; nothing of the bytes is lost."""
    parts = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert list(parsed(parts)) == EVENTS
    assert b"".join(event.raw for event in EVENTS) == STREAM


def test_parser_keeps_an_event_that_is_not_whole() -> None:
    """Its bytes are in `rest` until the empty line has come."""
    parser = EventParser()
    assert parser.feed(b"id: r:1.1\ndata: {}\n") == [] and parser.rest == b"id: r:1.1\ndata: {}\n"
    assert [event.id for event in parser.feed(b"\n")] == ["r:1.1"] and parser.rest == b""


def test_parser_reads_a_long_event_in_small_parts_quickly() -> None:
    """Lines that wait for their end are not gone through in many ways: 1,000 lines come line by line."""
    lines = [b"data: %d\n" % number for number in range(1_000)]
    [event] = parsed([*lines, b"\n"])
    assert event.data.count(b"\n") == 999


def test_reader_keeps_what_follows_an_interruption() -> None:
    """The interruption and all after it are not passed on; a stream that can't be continued shows them at its end."""
    reader = EventReader()
    goes = b'data: {"error":{"message":"resume","code":"stream_interrupted"}}\n\n'
    assert reader.feed(b"data: 1\n\n" + goes + b"data: 2\n\nda") == b"data: 1\n\n"
    assert reader.interrupted and not reader.resumable
    assert reader.rest() == goes + b"data: 2\n\nda"
