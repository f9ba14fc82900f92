"""The checker finds every difference of streams: from the undisturbed one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ops.chaos.checker import EventPlace, Transcript, findings

WORDS = ["One", " two", " three", " four", " five"]
Events = list[tuple[str, str, str | None]]


def events(rid: str = "a" * 8) -> Events:
    """Id, text and finish reason of each event of a stream of five tokens."""
    tokens: Events = [(f"{rid}:{seq}.1", word, None) for seq, word in enumerate(WORDS, 1)]
    return [(f"{rid}:0.1", "", None), *tokens, (f"{rid}:5.2", "", "stop"), (f"{rid}:5.3", "", None)]


def transcript(said: Events) -> Transcript:
    """The transcript of a client that received these events, then the usage and [DONE]."""
    made = Transcript(done=True, usage=5)
    for event_id, text, finish in said:
        made.take(event_id, text, [text] if text else [], finish)
    made.take(said[-1][0].rpartition(":")[0] + ":5.4")
    return made


def test_an_equal_stream_is_exact() -> None:
    """Nothing is found, whatever the request's id."""
    assert findings(transcript(events("b" * 8)), transcript(events())) == []


def test_joined_events_are_exact() -> None:
    """Two tokens in one event, with the id of the second, are the same stream."""
    joined = events()
    joined[2:4] = [(joined[3][0], WORDS[1] + WORDS[2], None)]
    got, expected = transcript(joined), transcript(events())
    got.tokens = expected.tokens
    assert findings(got, expected) == []


def lose(said: Events) -> None:
    del said[3]


def repeat(said: Events) -> None:
    said.insert(4, said[3])


def change(said: Events) -> None:
    said[3] = (said[3][0], " thee", None)


def swap(said: Events) -> None:
    said[2], said[3] = said[3], said[2]


def cut_short(said: Events) -> None:
    del said[5]


def end_otherwise(said: Events) -> None:
    said[-2] = (said[-2][0], "", "length")


def belong_to_another(said: Events) -> None:
    said[3] = ("c" * 8 + ":3.1", said[3][1], None)


def shift(said: Events) -> None:
    """The same text under the wrong ids: a resume from here would go wrong."""
    said[2:4] = [(said[2][0], WORDS[1] + WORDS[2], None), (said[3][0], "", None)]


@pytest.mark.parametrize(
    "harm", [lose, repeat, change, swap, cut_short, end_otherwise, belong_to_another, shift], ids=lambda f: f.__name__
)
def test_every_harm_is_found(harm: Callable[[Events], None]) -> None:
    """A token lost, repeated, changed, out of order, misplaced, or an end that differs."""
    said = events()
    harm(said)
    got = transcript(said)
    if harm is not change:
        got.tokens = list(WORDS)  # the events alone must show it
    assert findings(got, transcript(events()))


def test_a_stream_without_an_end_is_found() -> None:
    """All of the text is there, but [DONE] never came."""
    got = transcript(events())
    got.done = False
    assert any("did not end" in one for one in findings(got, transcript(events())))


def test_an_error_is_found() -> None:
    """Whatever the client was told is quoted."""
    got = transcript(events())
    got.errors.append("an error event: deadline_exceeded")
    assert "an error event: deadline_exceeded" in findings(got, transcript(events()))


def test_places_are_ordered_by_entry_then_part() -> None:
    """9.1 comes before 10.0, as numbers do and texts do not."""
    assert EventPlace.of("x:9.1") < EventPlace.of("x:10.0") < EventPlace.of("x:10.1")
