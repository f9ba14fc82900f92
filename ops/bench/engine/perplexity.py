"""The perplexity of texts with each type of cached keys and values, beside that with float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import click
import numpy as np
from tokenizers import Tokenizer

from control.messages import ModelSpec
from ops.demo import MODEL_DIR
from ops.harness.program import Figure, benchmark, run
from worker.collective import Solo
from worker.kv.base import CacheLayout
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.models.served import Row, ServedModel, flatten
from worker.repository.assets import assets_of
from worker.repository.files import inspect

LIMITS = {"f16": 1.001, "bf16": 1.005, "q8_0": 1.005}
"""Times the perplexity with float32."""
EXACT = "f32"


@benchmark
def perplexity(
    model: Annotated[Path, click.Path(path_type=Path), "A folder or GGUF file."] = MODEL_DIR,
    dequantize: Annotated[bool, "As `furrow serve` takes it."] = False,
    texts: Annotated[tuple[Path, ...], "--text", click.Path(dir_okay=False, path_type=Path)] = (),
    types: Annotated[tuple[str, ...], "--kv-type", click.Choice(list(LIMITS))] = tuple(LIMITS),
    window: Annotated[int, click.IntRange(8), "Tokens of a sequence."] = 512,
    most: Annotated[int, click.IntRange(16), "Tokens of each text."] = 16_384,
) -> list[Figure]:
    """Each text is cut into sequences of `--window` tokens. Without `--text` this program's own source is the text."""
    files = inspect(model)
    tokenizer = Tokenizer.from_str(assets_of(files, ModelSpec(name="measured", source=str(model))).tokenizer_json)
    sequences: list[list[int]] = []
    for text in texts or (Path(__file__),):
        tokens = tokenizer.encode(text.read_text(errors="replace")).ids[:most]
        sequences += [tokens[at : at + window] for at in range(0, len(tokens) - 1, window)]
    count = sum(len(one) - 1 for one in sequences)
    click.echo(f"{model.name}: {count} tokens of {len(texts) or 1} texts, sequences of {window}")
    measured: dict[str, float] = {}
    for kv_type in (EXACT, *types):
        loaded = load(files, collective=Solo(), dequantize=dequantize, kv_type=kv_type)
        measured[kv_type] = math.exp(sum(_loss(loaded, one) for one in sequences) / count)
        assert isinstance(loaded.cache_layout, CacheLayout)
        size = loaded.cache_layout.bytes_per_token
        click.echo(f"{kv_type:<6}{size:>8} bytes a token, perplexity {measured[kv_type]:.5f}")
    ratios = {one: measured[one] / measured[EXACT] for one in types}
    return [Figure(f"{one} / {EXACT}, thousandths", 1000 * ratios[one], 1000 * LIMITS[one]) for one in types]


def _loss(model: ServedModel, tokens: list[int]) -> float:
    """The sum of the negative log probabilities of all tokens but the first."""
    assert isinstance(model.cache_layout, CacheLayout)
    store = SlabStore(model.cache_layout, len(tokens))
    row = Row(0, tokens, 0, True)
    batch = flatten([row], store.begin([row.extent]))
    every = type(batch)(batch.tokens, batch.positions, np.arange(len(tokens)), batch.cache)
    logits = np.asarray(model.forward(every), np.float64)[:-1]
    top = logits.max(axis=1, keepdims=True)
    totals = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
    return float((totals - logits[np.arange(len(tokens) - 1), tokens[1:]]).sum())


if __name__ == "__main__":
    run(perplexity)
