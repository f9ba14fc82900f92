"""From logits to the log probabilities of tokens that are known: those of a prompt."""

from __future__ import annotations

import torch

from control.messages import PromptToken

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
