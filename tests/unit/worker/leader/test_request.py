"""A claimed request is rebuilt from its log: noted token by token, emitted in order."""

from __future__ import annotations

import pytest

from control.errors import Lost
from control.messages import GenerationRequest, LogEntry, Sampling
from control.requests import Claimed
from worker.leader.request import EMIT_ENTRIES, OFFER_ENTRIES, RunningRequest, emissions_of


def claimed(log: list[LogEntry], n: int = 1) -> RunningRequest:
    """Rebuilt from its log, which arrives in two pages."""
    params = GenerationRequest(prompt=[1, 2], sampling=Sampling(max_tokens=9, seed="1", n=n))
    request = RunningRequest.begin(Claimed("r", "t", "normal", 1, 0, len(log), n, 0), params)
    request.replay(log[:1])
    request.replay(log[1:])
    return request


def test_new_work_begins_at_seq_1() -> None:
    """An empty log: every choice runs from its prompt."""
    request = claimed([], n=2)
    assert [sequence.output for sequence in request.live] == [[], []]
    request.append(1, 42)
    emission = request.emission()
    assert (emission.seq, emission.entries, emission.done) == (1, [LogEntry(1, 1, 42)], None)


def test_adoption_continues_each_choice_after_its_log() -> None:
    """Tokens are given back to their choices, an ended choice stays ended, and seq goes on."""
    log = [LogEntry(1, 0, 5), LogEntry(2, 1, 6, "stop", "token"), LogEntry(3, 0, 7)]
    request = claimed(log, n=2)
    assert [(s.choice, s.output) for s in request.live] == [(0, [5, 7])]
    request.append(0, 8, "length")
    emission = request.emission()
    assert emission.seq == 4 and emission.done == "finished"
    assert emission.entries == [LogEntry(4, 0, 8, "length")]


def test_the_first_entry_tells_what_was_cached() -> None:
    """Once, and of the sequence that spoke first; after an adoption what the log says stands."""
    request = claimed([], n=2)
    first, second = request.live
    first.cached_prompt_tokens, second.cached_prompt_tokens = 1, 2
    request.append(0, 5)
    request.append(1, 6)
    assert [entry.cached for entry in request.history] == [1, None]
    again = claimed(request.history[:], n=2)
    again.live[0].cached_prompt_tokens = 2
    again.append(0, 7)
    assert [entry.cached for entry in again.history] == [1, None, None]


def test_an_emission_is_kept_until_redis_took_it() -> None:
    """A repeat carries the same entries and seq; afterwards the next one follows on."""
    request = claimed([])
    request.append(0, 5)
    assert request.emission() == request.emission()
    request.emitted(request.emission())
    assert (request.emission().seq, request.emission().entries) == (2, [])


def test_what_comes_while_an_emission_is_under_way_waits_for_the_next() -> None:
    """The next step's token is neither lost nor counted as taken."""
    request = claimed([])
    request.append(0, 5)
    under_way = request.emission()
    request.append(0, 6, "length")
    request.emitted(under_way)
    assert under_way.done is None
    assert (request.emission().entries, request.emission().done) == ([LogEntry(2, 0, 6, "length")], "finished")


def test_a_log_that_lost_its_end_is_sent_again_from_memory() -> None:
    """Also what an earlier leader produced; a log that is ahead, or refuses what it expects, can't be served so."""
    request = claimed([LogEntry(1, 0, 5), LogEntry(2, 0, 6)])
    request.append(0, 7)
    for elsewhere in (5, 3):
        with pytest.raises(Lost, match="elsewhere"):
            request.send_again(request.emission(), elsewhere)
    request.send_again(request.emission(), 2)
    assert request.emission().entries == [LogEntry(2, 0, 6), LogEntry(3, 0, 7)]


def test_an_ended_choice_takes_nothing_more() -> None:
    """A token after the end would be a repeated one: that is a fault, never a log entry."""
    request = claimed([])
    request.append(0, 5, "stop", "token")
    with pytest.raises(RuntimeError, match="has ended"):
        request.append(0, 6)


def test_an_end_from_outside_ends_every_live_choice_without_a_token() -> None:
    """A cancel writes one final entry for each choice that still runs."""
    request = claimed([LogEntry(1, 0, 5, "stop", "token")], n=3)
    request.end("cancelled", "by the client")
    emission = request.emission("cancelled")
    assert emission.done == "cancelled"
    assert [(e.seq, e.choice, e.token, e.finish) for e in emission.entries] == [
        (2, 1, None, "cancelled"),
        (3, 2, None, "cancelled"),
    ]


def test_all_logs_that_redis_lost_are_offered_in_bounded_parts() -> None:
    """Of 20 whole logs each offer brings OFFER_ENTRIES at most, a row of each request, and in the end everything."""
    long = 3 * EMIT_ENTRIES
    lost = [claimed([LogEntry(seq, 0, 7) for seq in range(1, long + 1)]) for _ in range(20)]
    for index, request in enumerate(lost):
        request.rid, request.accepted = f"r{index}", 0
        request.append(0, 8, "length")
    brought = 0
    while any(request.owes for request in lost):
        emissions = emissions_of(lost)
        assert len(emissions) == 20
        entries = sum(len(emission.entries) for emission in emissions)
        assert 0 < entries <= OFFER_ENTRIES
        brought += entries
        for request, emission in zip(lost, emissions, strict=True):
            assert (emission.done is not None) == (request.accepted + len(emission.entries) == long + 1)
            request.emitted(emission)
    assert brought == 20 * (long + 1)


def test_the_log_names_each_backend_once() -> None:
    """In the first entry; after an adoption only where the leader's backend is another one."""
    request = claimed([])
    request.fingerprint = "fp_a"
    for token in (5, 6):
        request.append(0, token)
    assert [entry.fingerprint for entry in request.history] == ["fp_a", None]
    for own, told in (("fp_a", None), ("fp_b", "fp_b"), (None, None)):
        again = claimed(request.history[:])
        again.fingerprint = own
        again.append(0, 7)
        again.append(0, 8)
        assert [entry.fingerprint for entry in again.history] == ["fp_a", None, told, None]
