"""Replayed requests are compared by hashes: of logits by their context, and the outcome of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.chaos.replays import Logits, ReplayTotals

A, B, C = "a" * 16, "b" * 16, "c" * 16


@pytest.mark.parametrize(("again", "differing"), [(B, 0), (C, 1)])
def test_a_context_has_one_row_of_logits(tmp_path: Path, again: str, differing: int) -> None:
    """In whichever process it was computed; a line that a kill cut is left out, and so is every other file."""
    (tmp_path / "1.logits").write_text(f"{A} {B} 0\n{B} {B} 2\n{A} {B}\n{A} {B[:5]}")
    (tmp_path / "2.logits").write_text(f"{A} {again} 1\n")
    (tmp_path / "sitecustomize.py").write_text(f"{B} {A}\n")
    logits = Logits()
    logits.read(tmp_path)
    assert (logits.rows, len(logits.contexts), logits.again, logits.differing) == (3, 2, 1, differing)
    assert logits.guessed == 2


def test_a_run_passes_only_where_rows_were_compared() -> None:
    """One token or row that differs fails it, and so do rows that were computed once only."""
    same = Logits(rows=20, again=10)
    outcome = ReplayTotals(requests=2, tokens=10)
    assert outcome.passed(same)
    assert not outcome.passed(Logits(rows=20, again=9))
    assert not outcome.passed(Logits(rows=20, again=10, differing=1))
    assert not ReplayTotals(requests=2, tokens=10, differing=["r: token 5"]).passed(same)
    assert not ReplayTotals().passed(Logits())
    assert outcome.lines(same)[0] == "replayed 2 requests of 10 tokens: 0 differ"
