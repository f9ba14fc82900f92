"""Vectors and scores equal transformers'; and sentence-transformers' formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from control.commands import BatchChange, GenerateStep, StepRow
from tests import pooled_models
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.stores import store_for
from worker.models.loading import load

# Token 1 is MPNet's padding, which has no position of its own.
PROMPTS = [[5, 6, 7], [70], list(range(2, 102)), [3, 3, 3, 3, 9, 9] * 5]

CASES: dict[str, dict[str, Any]] = {
    "bert": {"pool": "mean"},
    "roberta": {"pool": "cls"},
    "xlm-roberta": {"pool": "mean", "dense": (24,)},
    "camembert": {"pool": "mean"},
    "mpnet": {"pool": "mean"},
    "distilbert": {"pool": "cls", "normalize": False},
    "modernbert": {"pool": "mean"},
    "qwen3": {"pool": "last"},
    "gemma3_text": {"pool": "mean", "dense": (48, 20)},
}


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pooled_models.make(request.param, tmp_path_factory.mktemp(request.param), **CASES[request.param])


def engine_of(folder: Path, dtype: str = "float64") -> Engine:
    model = load(folder, collective=Solo(), dtype=dtype)
    return Engine(model, store_for(model.cache_layout, 4096, 512, 1), Solo())


def vectors(engine: Engine, steps: list[list[StepRow]]) -> dict[int, torch.Tensor]:
    """The vectors of all sampled rows of these steps, by sequence."""
    found: dict[int, torch.Tensor] = {}
    left: list[int] = []
    for seq, rows in enumerate(steps, 1):
        command = GenerateStep(epoch=1, seq=seq, model_id="m", change=BatchChange(rows=rows, left=left))
        with engine.step(command) as step:
            forward = step.forward()
            found |= dict(zip(forward.sids, forward.logits, strict=True))
            step.agree([0] * len(forward.sids))
        left = forward.sids
    return found


@pytest.mark.parametrize(("dtype", "far"), [("float64", 1e-12), ("float32", 1e-5)])
def test_vectors_are_those_of_transformers(folder: Path, dtype: str, far: float) -> None:
    """Of one input and of several in a batch: the same direction, and the same length."""
    rows = [StepRow(sid, tokens, 0, True) for sid, tokens in enumerate(PROMPTS)]
    together = vectors(engine_of(folder, dtype), [rows])
    alone = vectors(engine_of(folder, dtype), [[row] for row in rows])
    for sid, tokens in enumerate(PROMPTS):
        expected = pooled_models.reference(folder, tokens)
        for found in (together[sid], alone[sid]):
            assert found.shape == expected.shape
            assert torch.cosine_similarity(found.double(), expected, dim=0) > 1 - far
            assert abs(found.norm() / expected.norm() - 1) < 10 * far


def test_threads_compute_parts_of_a_batch(tmp_path: Path) -> None:
    """Vectors of sequences that are divided among threads are those of each sequence alone."""
    torch.set_num_threads(3)
    try:
        engine = engine_of(pooled_models.make("bert", tmp_path))
    finally:
        torch.set_num_threads(1)
    rows = [StepRow(sid, [(sid * place) % 128 for place in range(90)], 0, True) for sid in range(1, 8)]
    own_vectors = vectors(engine, [rows])
    for row in rows:
        expected = pooled_models.reference(tmp_path, row.tokens)
        assert torch.cosine_similarity(own_vectors[row.sid], expected, dim=0) > 1 - 1e-12


def test_positions_see_each_other(folder: Path) -> None:
    """The control of the parity: another last token moves the vector, so the test compares no constants."""
    rows = [StepRow(1, [5, 6, 7], 0, True), StepRow(2, [5, 6, 8], 0, True)]
    own_vectors = vectors(engine_of(folder), [rows])
    assert torch.cosine_similarity(own_vectors[1], own_vectors[2], dim=0) < 1 - 1e-6


def test_a_causal_model_takes_chunks(tmp_path: Path) -> None:
    """The vector of a prompt in chunks is that of the whole."""
    folder = pooled_models.make("qwen3", tmp_path, pool="last")
    tokens = PROMPTS[2]
    chunks = [[StepRow(1, tokens[at : at + 16], at, at + 16 >= len(tokens))] for at in range(0, len(tokens), 16)]
    own_vectors = vectors(engine_of(folder), chunks)
    assert torch.cosine_similarity(own_vectors[1], pooled_models.reference(folder, tokens), dim=0) > 1 - 1e-12


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
@pytest.mark.parametrize("identity", [False, True])
def test_scores_are_those_of_transformers(tmp_path: Path, kind: str, identity: bool) -> None:
    """The logit of a pair, by the activation that the files name; by a sigmoid where they name none."""
    changes = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}} if identity else {}
    folder = pooled_models.make_cross_encoder(kind, tmp_path, **changes)
    encoded = pooled_models.tokenizer(kind == "bert").backend_tokenizer.encode("what", "an answer")
    types = encoded.type_ids
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor([encoded.ids])}
        if kind == "bert":
            inputs["token_type_ids"] = torch.tensor([types])
        logit = model(**inputs).logits[0]
    second = types.index(1) if 1 in types else 0
    row = StepRow(1, encoded.ids, 0, True, second=second)
    other = StepRow(2, [5, 6], 0, True)
    own_vectors = vectors(engine_of(folder), [[other, row]])
    assert torch.allclose(own_vectors[1], logit if identity else logit.sigmoid(), atol=1e-12)
