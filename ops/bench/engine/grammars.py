"""The time that constrained answers add to a step, and the time to compile their grammars."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import click
import psutil
import torch
from llguidance import LLTokenizer
from tokenizers import pre_tokenizers

from control.messages import Grammar, ModelAssets, Sampling
from control.text.grammar import tokenizer_of
from control.text.vocabulary import read_token_bytes
from ops.harness.program import Outcome, ThreadCount, benchmark, run
from worker.engine.step import Forward
from worker.sampling.constraints import Masks
from worker.sampling.grammars import Grammars
from worker.sampling.sampler import StepSampler
from worker.scheduling.sequence import Finisher, Sequence

ANSWER = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age", "mail", "tags", "next"],
    "additionalProperties": False,
}
FIELDS = {"type": "object", "properties": {f"field {i}": {"type": "string", "maxLength": 40} for i in range(200)}}
GRAMMARS = {
    "json_object": Grammar("json_object"),
    "five fields": Grammar("json_schema", json.dumps(ANSWER)),
    "two hundred optional fields": Grammar("json_schema", json.dumps(FIELDS)),
    "five thousand choices": Grammar("choice", json.dumps([f"choice {i}" for i in range(5_000)])),
    "regex": Grammar("regex", r"[A-Z]{3}-\d{4}(, [a-z]+){1,50}"),
}


@dataclass(frozen=True, slots=True)
class StepCost:
    """Medians over steps, in ms. `masks` is a part of `bound`, which is sampling as a whole, as `free` is without."""

    grammar: str
    rows: int
    masks: float
    bound: float
    free: float


@benchmark
@torch.inference_mode()
def grammars(
    counts: Annotated[tuple[int, ...], "--rows"] = (1, 8, 64),
    vocabulary: Annotated[int, click.IntRange(1000), "Tokens."] = 151_936,
    steps: int = 30,
    threads: ThreadCount = None,
) -> Outcome:
    """Time grammars on a vocabulary of made-up words: compiling, and each step of constrained rows."""
    if threads is not None:
        torch.set_num_threads(threads)
    click.echo(f"{torch.get_num_threads()} threads, {vocabulary} tokens, {steps} steps")
    process = psutil.Process()
    begun = time.perf_counter()
    before = process.memory_info().rss
    assets = made_up(vocabulary)
    form = Future[LLTokenizer]()
    form.set_result(tokenizer_of(read_token_bytes(assets.tokenizer_json, assets.vocab_size), assets.eos_ids))
    compiler = Grammars(lambda: form, assets.eos_ids)
    _compile(compiler, Grammar("regex", "a"))
    grown = (process.memory_info().rss - before) / 2**20
    click.echo(f"vocabulary: {time.perf_counter() - begun:.2f} s, {grown:.0f} MiB")
    costs: list[StepCost] = []
    for name, grammar in GRAMMARS.items():
        click.echo(f"{name}: compiled in {1e3 * _compile(compiler, grammar):.1f} ms")
        for rows in counts:
            cost = measure(compiler, name, rows, vocabulary, steps)
            costs.append(cost)
            click.echo(f"  {rows} rows, ms: masks {cost.masks:.3f}, sampled {cost.bound:.2f}, free {cost.free:.2f}")
    return Outcome(details={"steps": costs})


def measure(compiler: Grammars, name: str, rows: int, vocabulary: int, steps: int) -> StepCost:
    """Rows that take the best of random logits, with the grammar and without it; who ends begins anew."""
    sampler = StepSampler()
    masks = Masks()
    finisher = Finisher(lambda ids: "")
    logits = torch.randn(rows, vocabulary)
    sids = list(range(1, rows + 1))
    bound = [_sequence(sid, GRAMMARS[name], compiler) for sid in sids]
    free = [_sequence(sid, None, compiler) for sid in sids]
    times: dict[str, list[float]] = {"masks": [], "bound": [], "free": []}
    for _ in range(steps):
        logits = logits.roll(997, dims=1)
        begin = time.perf_counter()
        masks.fill(bound)
        filled = time.perf_counter()
        sampler.begin(free, Forward(sids, logits)).wait()
        between = time.perf_counter()
        tokens = sampler.begin(bound, Forward(sids, logits)).wait().ids
        times["masks"].append(filled - begin)
        times["free"].append(between - filled)
        times["bound"].append(time.perf_counter() - between)
        for index, token in enumerate(tokens):
            bound[index].output.append(token)
            if finisher.decide(bound[index], token) is not None:
                bound[index] = _sequence(sids[index], GRAMMARS[name], compiler)
    taken = {kind: 1e3 * median(seconds) for kind, seconds in times.items()}
    return StepCost(name, rows, taken["masks"], taken["bound"], taken["free"])


def _compile(compiler: Grammars, grammar: Grammar) -> float:
    """Seconds until the grammar is ready."""
    begin = time.perf_counter()
    while not compiler.ready(grammar):
        compiler.wait(1.0)
    return time.perf_counter() - begin


def _sequence(sid: int, grammar: Grammar | None, compiler: Grammars) -> Sequence:
    sampling = Sampling(max_tokens=10**6, temperature=0.0, seed="0", grammar=grammar)
    sequence = Sequence(rid=str(sid), choice=0, prompt=[0], sampling=sampling, sid=sid)
    compiler.constrain(sequence)
    return sequence


def made_up(size: int) -> ModelAssets:
    """A byte-level vocabulary: all bytes, numbers, what JSON is made of, and words of random letters."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    draw = random.Random(0)
    words = dict.fromkeys([*names, *(str(i) for i in range(1000)), '{"', '":', '","', '"}', '"]', "}}", "ĠĠ", "Ċ"])
    while len(words) < size - 1:
        letters = "".join(draw.choices("etaoinshrdlcumwfgypbvkjxqz", range(26, 0, -1), k=draw.randint(2, 9)))
        words[draw.choice(["", "Ġ", "Ġ", "Ġ"]) + draw.choice([letters, letters, letters.capitalize()])] = None
    definition = {
        "model": {"vocab": {word: index for index, word in enumerate(words)}},
        "added_tokens": [{"id": size - 1, "content": "<|end|>"}],
        "decoder": {"type": "ByteLevel"},
    }
    return ModelAssets(
        tokenizer_json=json.dumps(definition),
        tokenizer_config={},
        chat_template=None,
        generation_config={},
        context_length=10**6,
        vocab_size=size,
        eos_ids=[size - 1],
        kv_tokens=10**6,
        created=0,
    )


if __name__ == "__main__":
    run(grammars)
