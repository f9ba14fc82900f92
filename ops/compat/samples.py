"""Scores measured by a client, compared with transformers on the same weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import ops.demo
from ops.compat.clients import Client
from ops.compat.runs import Result, Run

CHECK = "log-likelihoods within 1e-3 of transformers'"
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
    if not samples:
        return Result(CHECK, False, "there were none")
    reference, worst, where = Reference(), 0.0, ""
    for context, continuation, told in samples:
        away = abs(float(str(told)) - reference.log_likelihood(str(context), str(continuation)))
        if away >= worst:
            worst, where = away, f"{str(context)[-40:]!r} + {continuation!r}"
    return Result(CHECK, worst < WITHIN, f"{worst:.2g} apart at {where}")


class Reference:
    """transformers with the demonstration model, in float64."""

    def __init__(self) -> None:
        # Only here: whoever runs clients against a farm elsewhere has no need of them.
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM

        self._tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self._model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64)

    def log_likelihood(self, context: str, continuation: str) -> float:
        """Of the tokens that the whole text has more than its beginning."""
        import torch

        begun = len(self._tokenizer.encode(context, add_special_tokens=False).ids)
        tokens = self._tokenizer.encode(context + continuation, add_special_tokens=False).ids
        with torch.no_grad():
            logarithms = self._model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return float(sum(logarithms[at - 1, tokens[at]] for at in range(begun, len(tokens))))
