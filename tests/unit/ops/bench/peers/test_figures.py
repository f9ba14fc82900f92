"""Stamps become figures; and what is refused as a figure."""

from __future__ import annotations

import pytest

from ops.bench.peers.engine import Failed
from ops.bench.peers.results import check, equal_share, figures
from tests.unit.ops.bench.peers.fakes import stream


def test_the_first_token_does_not_count_for_the_decode_rate() -> None:
    """The first token's time counts for the whole and not for the decode rate."""
    figure_list = figures([stream(0.0, 2.0, 2.5, 3.0, 4.0)])
    assert figure_list.decode == pytest.approx(3 / 2)
    assert figure_list.whole == pytest.approx(4 / 4)
    assert (figure_list.ttft, figure_list.gap_p50, figure_list.gap_p99) == (2000, 500, 1000)


def test_only_the_time_in_which_all_decode_counts() -> None:
    """From the last first token to the first last one; what a stream did alone is not the rate of both."""
    streams = [stream(0.0, 1.0, 2.0, 3.0, 4.0), stream(0.0, 2.0, 3.0, 4.0, 5.0)]
    assert figures(streams).decode == pytest.approx(4 / 2)


def test_streams_that_never_met_have_no_common_rate() -> None:
    """The refusal names the remedy."""
    with pytest.raises(Failed, match="more --tokens"):
        figures([stream(0.0, 1.0, 2.0), stream(0.0, 3.0, 4.0)])


@pytest.mark.parametrize(
    "streams",
    [[], [stream(0.0, 1.0, 2.0)], [stream(0.0, 1.0), stream(0.0, 1.0, 2.0)]],
    ids=["none", "one of two", "one too short"],
)
def test_less_than_was_asked_is_refused(streams: list) -> None:
    """Streams or tokens that are missing fail the run."""
    with pytest.raises(Failed):
        check(streams, 2, 2)


def test_tokens_are_compared_until_they_differ() -> None:
    """Tokens after the first difference are not compared."""
    ours, theirs = stream(0, 1, 2, 3, 4, tokens=[5, 6, 7, 8]), stream(0, 1, 2, 3, 4, tokens=[5, 6, 9, 8])
    assert equal_share([ours, ours], [theirs, ours]) == pytest.approx(6 / 8)
