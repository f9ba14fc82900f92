"""What a client measured, compared with transformers on the same weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import ops.demo
from ops.compat.clients import Client
from ops.compat.runs import Result, Run

CHECK = "per-sample log-likelihoods are those of transformers, within 1e-3"
WITHIN = 1e-3
FOLDER = Path(ops.demo.__file__).parent / "model"


def judged(client: Client, run: Callable[[Path], Run]) -> Run:
    """`run` with a file for its samples; where it left some they are one check more."""
    with tempfile.TemporaryDirectory(prefix="furrow-compat-") as folder:
        samples = Path(folder) / "samples.json"
        done = run(samples)
        if samples.is_file():
            done.results.append(compared(json.loads(samples.read_text())))
    return done


def compared(samples: list[list[object]]) -> Result:
    """`samples`: [context, continuation, the client's log-likelihood], as text, text and number."""
    worst, where = 0.0, ""
    for context, continuation, told in samples:
        away = abs(float(str(told)) - _log_likelihood(str(context), str(continuation)))
        if away >= worst:
            worst, where = away, f"{context!r} + {continuation!r}"
    if not samples:
        return Result(CHECK, False, "there were none")
    return Result(CHECK, worst < WITHIN, f"{worst:.2g} apart at {where}")


def _log_likelihood(context: str, continuation: str) -> float:
    """In float64, of the tokens that the whole text has more than its beginning."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    begun = len(tokenizer.encode(context, add_special_tokens=False).ids)
    tokens = tokenizer.encode(context + continuation, add_special_tokens=False).ids
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64)
    with torch.no_grad():
        logarithms = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return float(sum(logarithms[at - 1, tokens[at]] for at in range(begun, len(tokens))))
