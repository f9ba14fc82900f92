"""Log-likelihoods are those of transformers: through the whole farm, two ranks and an API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import ops.demo
from tests.farm import Farm

FOLDER = Path(ops.demo.__file__).parent / "model"
SHORT = "What is a poisoned replica?"
LONG = " ".join(f"Step {number} of the plan has {number * number % 97} rows." for number in range(110))


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in (SHORT, LONG)]
    assert len(prompts[1]) > 1100, "it must take several steps of 512 tokens"
    return prompts


@pytest.fixture(scope="module")
def expected(tokens: list[list[int]]) -> list[list[float]]:
    """transformers' log probability of each token after those before it."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64)
    values = []
    for prompt in tokens:
        with torch.no_grad():
            logarithms = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        values.append(logarithms[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist())
    return values


def scores(client: openai.OpenAI, prompt: Any, **fields: Any) -> list[list[float | None]]:
    answer = client.completions.create(
        model="demo", prompt=prompt, echo=True, logprobs=1, temperature=0, extra_body=fields
    )
    logprobs = [choice.logprobs for choice in answer.choices]
    return [list(one.token_logprobs or []) for one in logprobs if one is not None]


def test_log_likelihoods_equal_transformers(
    farm: Farm, client: openai.OpenAI, tokens: list[list[int]], expected: list[list[float]]
) -> None:
    """Prompts of one step and of several: together, alone, and once others have left what they computed of them."""
    together = scores(client, tokens, max_tokens=0)
    alone = [scores(client, prompt, max_tokens=1)[0][:-1] for prompt in tokens]
    cached = client.completions.create(model="demo", prompt=tokens[1], max_tokens=1)
    cached = client.completions.create(model="demo", prompt=tokens[1], max_tokens=1)
    assert cached.usage and cached.usage.prompt_tokens_details and cached.usage.prompt_tokens_details.cached_tokens
    again = scores(client, tokens, max_tokens=0)
    for found in (together, alone, again):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine[0] is None
            assert mine[1:] == pytest.approx(theirs, abs=1e-5)
