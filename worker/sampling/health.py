"""The check that raw logits are finite, before any mask, for greedy rows too."""

from __future__ import annotations

import msgspec
import torch


class LogitsHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a row with NaN or infinity. The last three are over its finite values, None if there are none."""

    len: int
    nan: int
    pos_inf: int
    neg_inf: int
    finite_min: float | None
    max: float | None
    mean: float | None


def inspect(logits: torch.Tensor) -> dict[int, LogitsHealth]:
    """Reports of those rows of raw logits [rows, vocabulary] that are not finite throughout, by row index. A healthy
    batch costs one reduction, as a sum with NaN or infinity in it is not finite."""
    suspects = (~logits.sum(dim=-1).isfinite()).nonzero()[:, 0].tolist()
    # A sum of finite numbers may overflow, so the sum alone is no proof.
    return {row: _report(logits[row]) for row in suspects if not bool(logits[row].isfinite().all())}


def _report(row: torch.Tensor) -> LogitsHealth:
    finite = row[row.isfinite()].to(torch.float64)
    some = finite.numel() > 0
    return LogitsHealth(
        len=row.numel(),
        nan=int(row.isnan().sum()),
        pos_inf=int(row.isposinf().sum()),
        neg_inf=int(row.isneginf().sum()),
        finite_min=float(finite.min()) if some else None,
        max=float(finite.max()) if some else None,
        mean=float(finite.mean()) if some else None,
    )
