"""transformers' `generate` on one batch of prompts of equal length, with its default cache and attention."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from ops.bench.peers.engine import Setup, Stream
from ops.bench.peers.weights import of_transformers


class Generate:
    """A model and its `generate`."""

    def __init__(self, setup: Setup) -> None:
        self._model, self._device = load_model(setup), setup.device

    def run(self, prompts: list[list[int]], tokens: int) -> list[Stream]:
        """As Loop's; the prompts have equal lengths, so that nothing is padded."""
        sent, stamps, rows = generate(self._model, self._device, prompts, tokens)
        return [Stream(sent, list(stamps), row) for row in rows]


def generate(
    model: Any, device: str, prompts: list[list[int]], tokens: int
) -> tuple[float, list[float], list[list[int]]]:
    """Greedy; when it began, when each token of all prompts was there (s, monotonic), and the tokens by prompt."""
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    sent = time.monotonic()
    clock = _Clock()
    ids = torch.tensor(prompts, device=device)
    with torch.inference_mode():
        ids_of_all = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    return sent, clock.stamps, ids_of_all[:, ids.shape[1] :].tolist()


class _Clock(StoppingCriteria):
    """Asked after each token, it notes the time and never stops."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.stamps.append(time.monotonic())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def load_model(setup: Setup) -> Any:
    """The model, ready for inference. Raises Unavailable."""
    if setup.device == "cpu":
        torch.set_num_threads(setup.threads)
    dtype = getattr(torch, of_transformers(setup.weights))
    return AutoModelForCausalLM.from_pretrained(setup.folder, dtype=dtype).to(setup.device).eval()


def load(setup: Setup) -> Generate:
    """As LoadEngine. Raises Unavailable."""
    return Generate(setup)
