"""Encoders are built without weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from worker.families.encoders import unified
from worker.models.torch.pooled import BertEncoder, ModernEncoder, RowThreads

SHAPE: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


@pytest.mark.parametrize(("kind", "encoder"), [("mpnet", BertEncoder), ("modernbert", ModernEncoder)])
def test_nothing_is_initialised(
    kind: str, encoder: type[BertEncoder | ModernEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device that would import torch's compiler, which takes seconds."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a parameter was initialised")

    for name in ("normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_"):
        monkeypatch.setattr(torch.nn.init, name, refuse)
    with torch.device("meta"):
        built = encoder(unified({"model_type": kind, **SHAPE}), RowThreads(1))
        with pytest.raises(AssertionError):  # the control
            torch.nn.Embedding(2, 2)
    assert all(parameter.is_meta for parameter in built.parameters())
