"""The comparison of a client's stream with the undisturbed one. Pure: no I/O.

Positions are compared, not only texts: every event id names a place in the token log, and the text up to an id must be
the text that the undisturbed client had at the same id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

SHOWN = 40
"""Characters of a text that a finding quotes."""


class EventPlace(NamedTuple):
    """An event id without its request: the seq in the token log, and the part of that entry."""

    seq: int
    part: int

    @classmethod
    def of(cls, event_id: str) -> EventPlace:
        """Raises ValueError for anything but `rid:seq.part`."""
        seq, part = event_id.rpartition(":")[2].split(".")
        return cls(int(seq), int(part))


@dataclass(slots=True)
class Transcript:
    """The part of a stream that one client received, over all its connections."""

    rid: str = ""
    text: str = ""
    finish: str | None = None
    done: bool = False
    usage: int | None = None
    """Tokens of the answer, as the last event says."""
    tokens: list[str] = field(default_factory=list)
    """One text for each token, where log probabilities were asked for."""
    places: list[EventPlace] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Characters of the text after the event at the same index of `places`."""
    rids: set[str] = field(default_factory=set)
    """The requests that its event ids name."""
    errors: list[str] = field(default_factory=list)
    last_id: str = ""

    def take(self, event_id: str, text: str = "", tokens: list[str] | None = None, finish: str | None = None) -> None:
        """Add one event."""
        self.text += text
        self.tokens += tokens or []
        self.finish = finish or self.finish
        self.places.append(EventPlace.of(event_id))
        self.lengths.append(len(self.text))
        self.rids.add(event_id.rpartition(":")[0])
        self.last_id = event_id


def findings(got: Transcript, expected: Transcript) -> list[str]:
    """The errors of `got`, in words; none if it is exact. `expected` is the undisturbed stream."""
    wrong = list(got.errors)
    if not got.done:
        wrong.append(f"it did not end; its last event is {got.last_id or 'none'}")
    if len(got.rids) > 1:
        wrong.append(f"its events belong to {len(got.rids)} requests")
    for before, after in zip(got.places, got.places[1:], strict=False):
        if after <= before:
            wrong.append(f"event {after.seq}.{after.part} came after {before.seq}.{before.part}")
            break
    wrong += _text(got, expected)
    if got.tokens != expected.tokens:
        wrong.append(f"{len(got.tokens)} tokens with log probabilities differ from {len(expected.tokens)}")
    if got.places[-1:] != expected.places[-1:]:
        wrong.append(f"its last place is {got.places[-1:]}, not {expected.places[-1:]}")
    if (got.finish, got.usage) != (expected.finish, expected.usage):
        wrong.append(f"finish {got.finish!r} after {got.usage} tokens, not {expected.finish!r} after {expected.usage}")
    return wrong


def _text(got: Transcript, expected: Transcript) -> list[str]:
    wrong: list[str] = []
    if got.text != expected.text:
        at = next((i for i, (a, b) in enumerate(zip(got.text, expected.text, strict=False)) if a != b), None)
        at = min(len(got.text), len(expected.text)) if at is None else at
        there = got.text[at : at + SHOWN]
        right = expected.text[at : at + SHOWN]
        wrong.append(f"from character {at} of {len(expected.text)} on it says {there!r}, not {right!r}")
    lengths = dict(zip(expected.places, expected.lengths, strict=True))
    for place, length in zip(got.places, got.lengths, strict=True):
        # Events are joined differently in every run; places that both have must agree.
        if lengths.get(place, length) != length:
            wrong.append(f"at event {place.seq}.{place.part} it has {length} characters, not {lengths[place]}")
            break
    return wrong
