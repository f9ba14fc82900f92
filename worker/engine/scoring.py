"""From logits to the log probabilities of tokens that are known: those of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog
import torch

from control.messages import PromptToken

log = structlog.get_logger()

DIGITS = 6
"""Decimals of a log probability that is told: more than float32 is good for, and half as long in the token log."""


def score(logits: torch.Tensor, targets: list[int], most: int) -> list[PromptToken | None]:
    """For each row of raw `logits` [rows, vocabulary] its token of `targets` with log probability and rank, and the
    `most` most likely ones; None for a row that is not finite throughout."""
    healthy = logits.isfinite().all(dim=-1).tolist()
    logarithms = logits.log_softmax(dim=-1)
    chosen = logarithms.gather(-1, torch.tensor(targets, device=logits.device)[:, None])
    ranks = (logarithms > chosen).sum(dim=-1) + 1
    best = logarithms.topk(min(most, logits.shape[-1]), dim=-1)
    columns = zip(
        targets, chosen[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
    )
    return [
        PromptToken(
            token, round(own, DIGITS), rank, [(id, round(value, DIGITS)) for id, value in zip(ids, values, strict=True)]
        )
        if fine
        else None
        for fine, (token, own, rank, ids, values) in zip(healthy, columns, strict=True)
    ]


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

    def __init__(self, targets: Mapping[int, ScoreTarget], places: list[tuple[int, int]]) -> None:
        """`places` are (sid, position) of the forward's scored positions, in order."""
        self._targets, self._places = targets, places
        self._tokens: dict[int, list[PromptToken]] = {sid: [] for sid in targets}
        self._failed: dict[int, str] = {}

    def window(self, logits: torch.Tensor, first: int) -> None:
        """Take the logits [count, vocabulary] of the places from index `first` on."""
        places = self._places[first : first + len(logits)]
        try:
            self._score(logits, places)
        except Exception:
            sids = sorted({sid for sid, _ in places})
            log.exception("could not score prompts", sids=sids, action="score_prompts")
            self._failed |= dict.fromkeys(sids, "its prompt could not be scored; the server's log has the cause")

    def _score(self, logits: torch.Tensor, places: list[tuple[int, int]]) -> None:
        targets = [self._targets[sid] for sid, _ in places]
        following = [target.prompt[position + 1] for target, (_, position) in zip(targets, places, strict=True)]
        tokens = score(logits, following, max(target.top for target in targets))
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
