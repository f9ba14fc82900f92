"""From logits to the log probabilities of tokens that are known: those of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from control.messages import PromptToken
from worker.native import library
from worker.native.library import Threads

log = structlog.get_logger()

DIGITS = 6
"""Decimals of a log probability that is told: more than float32 is good for, and half as long in the token log."""


def score(logits: Any, targets: list[int], most: int, threads: Threads | None) -> list[PromptToken | None]:
    """For each row of raw `logits` [rows, vocabulary] its token of `targets` with log probability and rank, and the
    `most` most likely ones; None for a row that is not finite throughout. `threads` are those of a forward in C++;
    None where torch runs it."""
    if threads is None:
        from worker.engine.torch.scoring import scores_of_tensor  # only where torch runs the forward

        return scores_of_tensor(logits, targets, most)
    return _scores_of_array(logits, targets, most, threads)


def _scores_of_array(
    logits: NDArray[np.float32], targets: list[int], most: int, threads: Threads
) -> list[PromptToken | None]:
    best = threads.best_tokens(logits)
    most = min(most, logits.shape[1])
    tokens = np.empty((len(best), most), np.int64)
    logprobs = np.empty((len(best), most), np.float32)
    structs = (library.Sampled * len(best))()
    for index, struct in enumerate(structs):
        struct.logits, struct.vocabulary = logits[index].ctypes.data, logits.shape[1]
        struct.forced, struct.repetition = targets[index], 1
        struct.ranked, struct.ranks, struct.rankings = most, tokens[index].ctypes.data, logprobs[index].ctypes.data
    threads.sample(structs)
    scores: list[PromptToken | None] = []
    for row, target, token, struct, *top in zip(logits, targets, best, structs, tokens, logprobs, strict=True):
        if token == library.NOT_FINITE:
            scores.append(None)
            continue
        likely, values = (part.tolist() for part in top)
        rounded = [(id, round(value, DIGITS)) for id, value in zip(likely, values, strict=True)]
        rank = int(np.count_nonzero(row > row[target])) + 1
        scores.append(PromptToken(target, round(struct.logprob, DIGITS), rank, rounded))
    return scores


@dataclass(frozen=True, slots=True)
class ScoreTarget:
    """A prompt whose tokens are scored, each with the `top` most likely ones at its place."""

    prompt: list[int]
    top: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The scores of one forward, by sid: each sequence of the targets is in one of the two."""

    tokens: dict[int, list[PromptToken]] = field(default_factory=dict)
    """The scored tokens, in the order of their positions."""
    failed: dict[int, str] = field(default_factory=dict)
    """The reason why a prompt could not be scored."""


class PromptScorer:
    """Scores the positions of one forward, window by window. Never raises: an error ends its sequences alone."""

    def __init__(
        self, targets: Mapping[int, ScoreTarget], places: list[tuple[int, int]], threads: Threads | None
    ) -> None:
        """`places` are (sid, position) of the forward's scored positions, in order; `threads` as in `score`."""
        self._targets = targets
        self._places = places
        self._threads = threads
        self._tokens: dict[int, list[PromptToken]] = {sid: [] for sid in targets}
        self._failed: dict[int, str] = {}

    def window(self, logits: Any, first: int) -> None:
        """Take the logits [count, vocabulary] of the places from index `first` on."""
        places = self._places[first : first + len(logits)]
        try:
            self._score(logits, places)
        except Exception:
            sids = sorted({sid for sid, _ in places})
            log.exception("could not score prompts", sids=sids, action="score_prompts")
            self._failed |= dict.fromkeys(sids, "its prompt could not be scored; the server's log has the cause")

    def _score(self, logits: Any, places: list[tuple[int, int]]) -> None:
        targets = [self._targets[sid] for sid, _ in places]
        following = [target.prompt[position + 1] for target, (_, position) in zip(targets, places, strict=True)]
        tokens = score(logits, following, max(target.top for target in targets), self._threads)
        for (sid, position), target, token in zip(places, targets, tokens, strict=True):
            if token is None:
                self._failed[sid] = f"the model's logits are not finite after token {position} of the prompt"
            else:
                # A neighbour may want more of the most likely ones.
                self._tokens[sid].append(PromptToken(token.token, token.logprob, token.rank, token.top[: target.top]))

    @property
    def scores(self) -> PromptScores:
        scored = {sid: tokens for sid, tokens in self._tokens.items() if sid not in self._failed}
        return PromptScores(scored, self._failed)
