"""Greedy decoding of a batch, timed step by step, by several engines in turns on the same weights: Furrow's forward in
C++ and in torch, several ranks, and transformers' `generate`."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Protocol

import click
import torch
from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from control.commands import BatchChange, GenerateStep, StepRow
from control.messages import Sampling
from ops.bench.peers.loops.transformers_generate import generate
from ops.harness.program import (
    PATH,
    Figure,
    ModelsFolder,
    Outcome,
    Quant,
    Shape,
    ThreadCount,
    benchmark,
    models_of,
    run,
)
from worker.collective import Collective, Solo, rendezvous
from worker.collective.base import Abort
from worker.engine.step import Engine
from worker.kv.base import STORED_TYPES, CacheLayout
from worker.kv.stores import store_for
from worker.kv.torch.pages import BLOCK_TOKENS
from worker.models.loading import load
from worker.native.host import SWITCH
from worker.repository.files import ModelFiles
from worker.repository.validation import context_length
from worker.sampling.sampler import StepSampler
from worker.scheduling.sequence import Sequence

CPP = "c++"
TORCH = "torch"
TRANSFORMERS = "transformers"
RANKS = "ranks"
GLOO = "ranks-gloo"
RANKS_SHARE = 0.90
"""Of one rank's decode rate, with as many threads in all, that ranks sharing memory are to reach."""
SEQUENCES = 256
"""Sequences whose recurrent states have room beside the tokens that are asked for."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """`seconds[0]` is the prompt and the first token, each further one a step; `tokens` is by sequence."""

    seconds: list[float]
    tokens: list[list[int]]


class Decoder(Protocol):
    def decode(self, prompts: list[list[int]], count: int) -> Decoded:
        """`count` tokens for each prompt, all in one batch; the prompts have equal lengths."""
        ...


@dataclass(frozen=True)
class Setting:
    """The weights and the resources of every engine."""

    folder: Path
    dtype: str
    device: str
    threads: int
    kv_tokens: int
    tp: int
    quant: str | None = None
    kv_type: str | None = None

    @property
    def furrow_dtype(self) -> str:
        """A CPU computes in float32 whatever the checkpoint has, unless it is to be exact."""
        return "float32" if self.device == "cpu" and self.dtype != "float64" else self.dtype


class Furrow:
    """The engine and sampler as a leader uses them, without Redis; one rank of a group where `collective` is given."""

    def __init__(self, setting: Setting, collective: Collective | None = None, cpp: bool = True) -> None:
        os.environ[SWITCH] = "1" if cpp else "0"
        config = json.loads((setting.folder / "config.json").read_text())
        files = ModelFiles(config=config, weights=sorted(setting.folder.glob("*.safetensors")), folder=setting.folder)
        self._collective = collective or Solo()
        model = load(
            files,
            collective=self._collective,
            dtype=setting.furrow_dtype,
            quant=setting.quant,
            kv_type=setting.kv_type,
            device=setting.device,
        )
        assert isinstance(model.cache_layout, CacheLayout)
        room = setting.kv_tokens + SEQUENCES * model.cache_layout.state_tokens
        store = store_for(model.cache_layout, room, context_length(config), self._collective.world_size)
        self._engine = Engine(model, store, self._collective)
        self.weight_bytes = model.weight_bytes
        self._engine.prepare()
        self._next = 0
        self._running: list[int] = []

    def decode(self, prompts: list[list[int]], count: int) -> Decoded:
        """As Decoder's; on every rank of a group alike."""
        sids = list(range(self._next, self._next + len(prompts)))
        new = dict(zip(sids, prompts, strict=True))
        sampling = Sampling(max_tokens=count, temperature=0.0, seed="0")
        sequences = {sid: Sequence(rid="", choice=0, prompt=new[sid], sampling=sampling, sid=sid) for sid in sids}
        sampler = StepSampler()
        # A step ends when its tokens are here; the device may be at work on the next one by then.
        seconds = []
        before = time.perf_counter()
        for step in range(count):
            command = self._command(new if step == 0 else {}, step + 1)
            with self._engine.step(command) as running:
                forward = running.forward()
                if running.rank == 0:
                    pending = sampler.begin([sequences[sid] for sid in forward.sids], forward)
                    running.run_ahead(pending.on_device)
                    running.agree(pending.wait().ids)
                else:
                    running.agree()
            for sid, token in zip(forward.sids, running.tokens, strict=True):
                sequences[sid].output.append(token)
            after = time.perf_counter()
            seconds.append(after - before)
            before = after
        self._next, self._running = self._next + len(prompts), sids
        return Decoded(seconds, [sequences[sid].output for sid in sids])

    def _command(self, new: dict[int, list[int]], seq: int) -> GenerateStep:
        """New prompts take the place of what ran before; without any, every sequence decodes by itself."""
        rows = [StepRow(sid, tokens, 0, True) for sid, tokens in new.items()]
        change = BatchChange(rows=rows, left=self._running if new else [])
        return GenerateStep(epoch=1, seq=seq, model_id="bench", change=change)


class Transformers:
    """`generate` with its default cache and attention."""

    def __init__(self, setting: Setting) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(setting.folder, dtype=getattr(torch, setting.dtype))
        self._model, self._device = model.to(setting.device).eval(), setting.device

    def decode(self, prompts: list[list[int]], count: int) -> Decoded:
        """As Decoder's."""
        began, stamps, tokens = generate(self._model, self._device, prompts, count)
        return Decoded([after - before for before, after in pairwise([began, *stamps])], tokens)


class Ranks:
    """The processes of one group of `tp` ranks, each with its share of the threads; `decode` is timed by rank 0."""

    def __init__(self, setting: Setting, shared: bool = True) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imported once for all ranks
        self._scratch = tempfile.TemporaryDirectory(prefix="furrow-bench-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(setting.tp):
            ours, theirs = context.Pipe()
            about = (setting, rank, shared, f"{self._scratch.name}/rendezvous", theirs)
            self._processes.append(context.Process(target=_serve, args=about, daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)
        for pipe in self._pipes:
            self._answer(pipe)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()
        self._scratch.cleanup()

    def decode(self, prompts: list[list[int]], count: int) -> Decoded:
        """As Decoder's."""
        for pipe in self._pipes:
            pipe.send((prompts, count))
        first, *_others = [self._answer(pipe) for pipe in self._pipes]
        return first

    def _answer(self, pipe: Connection) -> Decoded:
        try:
            return pipe.recv()
        except EOFError:
            raise click.ClickException("a rank has ended; its last output is above") from None


def _serve(setting: Setting, rank: int, shared: bool, place: str, pipe: Connection) -> None:
    """One rank, until its pipe is closed."""
    torch.set_num_threads(max(1, setting.threads // setting.tp))
    logging.disable_progress_bar()
    collective: Collective = Solo()
    if setting.tp > 1:
        store = PrefixStore("bench", FileStore(place, setting.tp))
        collective = rendezvous.join(store, rank, setting.tp, "cpu", Abort(), shared)
    furrow = Furrow(setting, collective)
    pipe.send(None)
    try:
        while True:
            pipe.send(furrow.decode(*pipe.recv()))
    except EOFError:
        collective.close()


ENGINES: dict[str, Callable[[ExitStack, Setting], Decoder]] = {
    CPP: lambda stack, setting: Furrow(setting),
    TORCH: lambda stack, setting: Furrow(setting, cpp=False),
    TRANSFORMERS: lambda stack, setting: Transformers(setting),
    RANKS: lambda stack, setting: stack.enter_context(Ranks(setting)),
    GLOO: lambda stack, setting: stack.enter_context(Ranks(setting, shared=False)),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians over all steps of all rounds, the fastest step, and the prompt with its first token, in ms; tokens a
    second at the median."""

    step_ms: float
    fastest_ms: float
    first_ms: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class BatchComparison:
    """`equal` counts the sequences with the same tokens from all engines."""

    batch: int
    engines: dict[str, Timed]
    equal: int

    def line(self) -> str:
        cells = (
            f"{name} {timing.tokens_per_second:.1f} tok/s ({timing.step_ms:.2f} ms a step, "
            f"at best {timing.fastest_ms:.2f}; prompts {timing.first_ms:.0f} ms)"
            for name, timing in self.engines.items()
        )
        return f"batch {self.batch}: {'; '.join(cells)}; equal tokens in {self.equal} of {self.batch} sequences"


def compare(engines: dict[str, Decoder], prompts: list[list[int]], tokens: int, rounds: int) -> BatchComparison:
    """All engines in turns, so that a change of the machine's speed affects all; the first round is not counted."""
    runs = [{name: engine.decode(prompts, tokens) for name, engine in engines.items()} for _ in range(rounds + 1)]
    timed: dict[str, Timed] = {}
    for name in engines:
        steps = [1000 * seconds for run in runs[1:] for seconds in run[name].seconds[1:]]
        first = median(1000 * run[name].seconds[0] for run in runs[1:])
        timed[name] = Timed(median(steps), min(steps), first, 1000 * len(prompts) / median(steps))
    answers = zip(*(run.tokens for run in runs[-1].values()), strict=True)
    return BatchComparison(len(prompts), timed, sum(len(set(map(tuple, rows))) == 1 for rows in answers))


@benchmark
def decode(
    shape: Shape = "tiny",
    model: Annotated[Path | None, PATH, "Or this model folder."] = None,
    folder: ModelsFolder = None,
    names: Annotated[tuple[str, ...], "--engine", click.Choice(list(ENGINES)), "Taken in turns."] = (CPP, TORCH),
    batches: Annotated[tuple[int, ...], "--batch"] = (1, 8),
    prompt: Annotated[int, "Prompt tokens."] = 64,
    tokens: Annotated[int, click.IntRange(2), "Tokens to generate."] = 64,
    rounds: Annotated[int, "Measured rounds, taken in turns."] = 5,
    dtype: Annotated[str, click.Choice(("float32", "float64", "bfloat16", "float16")), "The checkpoint's."] = "float32",
    quant: Quant = None,
    kv_type: Annotated[str | None, click.Choice(list(STORED_TYPES)), "Keys and values of Furrow's engines."] = None,
    device: Annotated[str, "cpu or cuda:0."] = "cpu",
    tp: Annotated[int, click.IntRange(2, 8), "Ranks of the engines that have several."] = 2,
    threads: ThreadCount = None,
) -> Outcome:
    """Decode greedily with each engine, in turns: medians, and fastest steps, which other work disturbs least.

    --quant and --kv-type are Furrow's alone. Exit status 1 where ranks miss their share of the rate of c++.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise click.UsageError(f"--device {device}: torch sees no GPU here; use cpu")
    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    click.echo(f"{torch.get_num_threads()} threads, {quant or dtype}, {device}")
    click.echo(f"{model or shape}: {prompt} prompt tokens, {tokens} generated, {rounds} rounds")
    with ExitStack() as stack:
        checkpoint = model or stack.enter_context(models_of(shape, folder, dtype)).checkpoint()
        # A GPU keeps whole blocks of positions, and one more where it runs ahead.
        room = max(batches) * (prompt + tokens + 2 * BLOCK_TOKENS)
        setting = Setting(checkpoint, dtype, device, torch.get_num_threads(), room, tp, quant, kv_type)
        engines = {name: ENGINES[name](stack, setting) for name in names}
        for engine in engines.values():
            if isinstance(engine, Furrow):
                size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
                click.echo(f"weights {engine.weight_bytes / 1e6:.0f} MB, files {size / 1e6:.0f} MB")
                break
        vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
        comparisons: list[BatchComparison] = []
        for batch in batches:
            generator = torch.Generator().manual_seed(batch)
            prompts = torch.randint(vocabulary, (batch, prompt), generator=generator).tolist()
            comparisons.append(compare(engines, prompts, tokens, rounds))
            click.echo(comparisons[-1].line())
    return Outcome(limits(comparisons, tp) or None, {"batches": comparisons})


def limits(comparisons: list[BatchComparison], tp: int) -> list[Figure]:
    """The ranks that share memory beside one rank; nothing where one of them was not asked for."""
    rates = [
        (comparison.batch, comparison.engines.get(RANKS), comparison.engines.get(CPP)) for comparison in comparisons
    ]
    return [
        Figure(
            f"tp {tp} over tp 1, batch {batch}",
            ranks.tokens_per_second / one_rank.tokens_per_second,
            RANKS_SHARE,
            at_least=True,
        )
        for batch, ranks, one_rank in rates
        if ranks is not None and one_rank is not None
    ]


if __name__ == "__main__":
    run(decode)
