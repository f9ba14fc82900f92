"""The log probabilities of a prompt's tokens, of logits that torch computed."""

from __future__ import annotations

import torch

from control.messages import PromptToken
from worker.engine.scoring import DIGITS


def scores_of_tensor(logits: torch.Tensor, targets: list[int], most: int) -> list[PromptToken | None]:
    """As `score` of worker/engine/scoring.py, of logits that torch computed."""
    healthy = logits.isfinite().all(dim=-1).tolist()
    logarithms = logits.log_softmax(dim=-1)
    target_logarithms = logarithms.gather(-1, torch.tensor(targets, device=logits.device)[:, None])
    ranks = (logarithms > target_logarithms).sum(dim=-1) + 1
    best = logarithms.topk(min(most, logits.shape[-1]), dim=-1)
    columns = zip(
        targets,
        target_logarithms[:, 0].tolist(),
        ranks.tolist(),
        best.indices.tolist(),
        best.values.tolist(),
        strict=True,
    )
    return [
        PromptToken(
            token,
            round(logarithm, DIGITS),
            rank,
            [(id, round(value, DIGITS)) for id, value in zip(ids, values, strict=True)],
        )
        if fine
        else None
        for fine, (token, logarithm, rank, ids, values) in zip(healthy, columns, strict=True)
    ]
