"""The chaos report counts streams by fault: under the faults that each met."""

from __future__ import annotations

import json

from ops.chaos import run as report
from ops.chaos.checker import Transcript
from ops.chaos.load import Attempt, Checked, Question, longest_silence
from ops.chaos.run import Strike, StrikeRecord


def attempt(began: float, *heard: float) -> Attempt:
    """A stream with an event at each moment; the last is its end."""
    return Attempt(Question("q", b""), Transcript(done=True), began, heard[-1], list(heard), [began])


def struck(kind: str, began: float, ended: float, proof: str | None = "pid 1 -> 2") -> StrikeRecord:
    return StrikeRecord(Strike(kind, False, 0.0, 1), began, ended, 1, proof)


def test_a_stream_counts_where_it_was_under_way() -> None:
    """One that ended before the fault or began after it is not that fault's."""
    streams = [Checked(attempt(0, 1, 2), []), Checked(attempt(3, 4, 9), []), Checked(attempt(7, 8), ["lost"])]
    [row] = report.rows([struck("rank-kill", 5, 6)], streams)
    assert (row.streams, row.exact, row.strikes, row.proved) == (1, 1, 1, 1)
    assert row.gap_worst_s == 5


def test_a_connection_made_again_counts_while_the_fault_lasts() -> None:
    """The first connection never does."""
    stream = attempt(0, 1, 9)
    stream.connected += [5.5, 8.0]
    [row] = report.rows([struck("api-kill", 5, 6)], [Checked(stream, [])])
    assert row.resumed == 1


def test_a_run_passes_only_with_proof_and_exact_streams() -> None:
    """A broken stream, a strike without proof, and a run without any stream all fail."""
    good, bad = Checked(attempt(0, 9), []), Checked(attempt(0, 9), ["lost"])
    strike, unproved = struck("rank-kill", 5, 6), struck("rank-kill", 5, 6, None)
    assert report.passed([strike], [good])
    assert not report.passed([strike], [good, bad])
    assert not report.passed([strike, unproved], [good])
    assert not report.passed([strike], [])
    assert not report.passed([], [good])


def test_the_longest_silence_touches_the_fault() -> None:
    """Pauses before it began and after it ended are others'."""
    stream = attempt(0, 1, 4, 6, 20)
    assert longest_silence(stream, 4.5, 5) == 2
    assert longest_silence(stream, 3, 5) == 3
    assert longest_silence(stream, 30, 31) is None


def test_the_document_is_json_and_names_what_broke() -> None:
    """A broken stream comes with the numbers of the strikes that it met."""
    one = struck("rank-kill", 5, 6)
    made = json.loads(json.dumps(report.document("machine: x", 3, [one], [Checked(attempt(0, 9), ["lost"])])))
    assert made["passed"] is False and made["broken"][0]["strikes"] == [1]
    assert made["kinds"][0]["kind"] == "rank-kill"
    assert len(report.table(report.rows([one], []))) == 2
