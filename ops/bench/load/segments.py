"""Where a request's time went: from the timestamps in its hash, and the client's own clock, to segments.

parse        received by the API → in the queue: read, validated, rendered, tokenised, enqueued
queue        in the queue → claimed by a leader
claim        claimed → its first prompt tokens are fed: the step that was under way, and planning
prefill      first prompt tokens fed → first token in the log
first token  received by the API → first token in the log: the four above, together
decode       first token in the log → last one
publish      last token in the log → all handed to the connection: pub/sub, detokenising, writing
deliver      all handed to the connection → the client has read the end

The four beginnings and `first token` are taken from three clocks (API, Redis, leader), and `deliver` from two: run the
generator on a host whose clock agrees with the farm's, or the report says that the clocks differ.
"""

from __future__ import annotations

from collections.abc import Mapping

SEGMENTS: dict[str, tuple[str, str]] = {
    "parse": ("t_received", "t_enqueued"),
    "queue": ("t_enqueued", "t_claimed"),
    "claim": ("t_claimed", "t_prefill"),
    "prefill": ("t_prefill", "t_first"),
    "first token": ("t_received", "t_first"),
    "decode": ("t_first", "t_last"),
    "publish": ("t_last", "t_delivered"),
    "deliver": ("t_delivered", "client_end"),
}
"""Segment → the timestamps at which it begins and ends."""

STAMPS = tuple(dict.fromkeys(stamp for pair in SEGMENTS.values() for stamp in pair if stamp != "client_end"))
"""The fields of a request's hash that are read."""

SKEW_MS = 50.0
"""Stamps are whole ms of different processes: a little less than nothing is rounding, more is a wrong clock."""


class ClocksDiffer(Exception):
    """A segment ended before it began."""


def durations(stamps: Mapping[str, float]) -> dict[str, float]:
    """Segment → ms, for those whose two stamps are there. Raises ClocksDiffer."""
    found: dict[str, float] = {}
    for name, (begin, end) in SEGMENTS.items():
        if begin in stamps and end in stamps:
            took = stamps[end] - stamps[begin]
            if took < -SKEW_MS:
                raise ClocksDiffer(f"segment {name!r} took {took:.0f} ms: the clocks behind {begin} and {end} differ")
            found[name] = max(0.0, took)
    return found
