"""From the stamps of one run to the figures that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ops.bench.common.summary import median, percentile
from ops.bench.peers.base import Failed, Stream


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, or medians over rounds. Times in ms; rates in tokens per second, over all streams."""

    decode: float
    """While all streams decode. Where the engine takes one after another: while one does."""
    whole: float
    """From the first prompt sent to the last token, prompts included."""
    ttft: float
    """Until a stream's first token, the median over the streams."""
    gap_p50: float
    gap_p99: float
    """Between two tokens of a stream."""


def check(streams: Sequence[Stream], count: int, tokens: int) -> None:
    """Raises Failed where an answer is missing or shorter than asked: a figure of less would look like one of all."""
    if len(streams) != count:
        raise Failed(f"{len(streams)} of {count} streams were answered")
    for index, stream in enumerate(streams):
        if len(stream.tokens) != tokens or len(stream.stamps) != tokens:
            raise Failed(f"stream {index} has {len(stream.tokens)} tokens and {len(stream.stamps)} times of {tokens}")


def figures(streams: Sequence[Stream], at_once: bool) -> Figures:
    """Of checked streams of two tokens or more. Raises Failed where streams that run at once never all decoded."""
    began = min(stream.sent for stream in streams)
    ended = max(stream.stamps[-1] for stream in streams)
    gaps = sorted(
        later - earlier for stream in streams for earlier, later in zip(stream.stamps, stream.stamps[1:], strict=False)
    )
    return Figures(
        decode=_steady(streams) if at_once else _one_by_one(streams),
        whole=sum(len(stream.tokens) for stream in streams) / (ended - began),
        ttft=1000 * median([stream.stamps[0] - stream.sent for stream in streams]),
        gap_p50=1000 * percentile(gaps, 50),
        gap_p99=1000 * percentile(gaps, 99),
    )


def _steady(streams: Sequence[Stream]) -> float:
    """Tokens between the moment at which the last stream has its first token and the one at which a stream ends."""
    begin, end = max(stream.stamps[0] for stream in streams), min(stream.stamps[-1] for stream in streams)
    within = sum(begin < at <= end for stream in streams for at in stream.stamps)
    if end <= begin or within < len(streams):
        raise Failed("a stream ended before the last one began: ask for more --tokens, or a shorter --prompt")
    return within / (end - begin)


def _one_by_one(streams: Sequence[Stream]) -> float:
    seconds = sum(stream.stamps[-1] - stream.stamps[0] for stream in streams)
    if seconds <= 0:
        raise Failed("all tokens of each stream came at one moment: ask for more --tokens")
    return sum(len(stream.tokens) - 1 for stream in streams) / seconds


def equal_share(found: Sequence[Stream], reference: Sequence[Stream]) -> float:
    """How much of the answers is the same, counted from their beginnings: 1 where all are equal."""
    same = 0
    for one, other in zip(found, reference, strict=True):
        for ours, theirs in zip(one.tokens, other.tokens, strict=True):
            if ours != theirs:
                break
            same += 1
    return same / sum(len(stream.tokens) for stream in reference)
