"""Benchmarks of several ranks run several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.bench.engine.decode import Furrow, Ranks, Setting
from ops.harness import models

TINY = {**models.SHAPES["tiny"], "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}

pytestmark = pytest.mark.timeout(120)
"""Each rank is a new process, which has to import torch."""


def test_ranks_decode_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 with the very same tokens, each step timed."""
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)
    folder = models.build("tiny", tmp_path, "float64")
    prompts = [[1, 2, 3], [4, 5, 6]]
    setting = Setting(folder, "float64", "cpu", threads=2, kv_tokens=64, tp=2)
    with Ranks(setting) as ranks:
        decoded_tokens = ranks.decode(prompts, 6)
    assert decoded_tokens.tokens == Furrow(setting).decode(prompts, 6).tokens
    assert len(decoded_tokens.seconds) == 6 and all(seconds > 0 for seconds in decoded_tokens.seconds)
