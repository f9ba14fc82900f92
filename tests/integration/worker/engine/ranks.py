"""A rank group in real processes: forked from a server that has imported everything, told what to do by pipe."""

from __future__ import annotations

import errno
import functools
import mmap
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers.models.auto.modeling_auto  # noqa: F401  # imported once, in the fork server
from torch import Tensor
from torch import distributed as dist

from control.commands import GenerateStep
from control.messages import PromptToken
from tests.integration.worker.engine.stepping import greedy, rejected, run
from worker.collective import Collective, rendezvous
from worker.collective.base import Abort
from worker.engine.scoring import ScoreTarget
from worker.engine.step import Engine
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.native import memory


@dataclass
class Outcome:
    """One rank's view of a run. `tokens` and `logits` are by sequence, in order; logits only on rank 0."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logits: dict[int, list[Tensor]] = field(default_factory=dict)
    scored: dict[int, list[PromptToken]] = field(default_factory=dict)
    """By sequence, in the order of their positions; only on rank 0."""
    checksums: list[int] = field(default_factory=list)
    collectives: int = 0
    weight_bytes: int = 0
    left_over: int = 0
    """Cached tokens after the run."""
    is_native: bool = False
    """True if the forward runs in C++."""


def play(engine: Engine, steps: list[GenerateStep], targets: dict[int, ScoreTarget] | None = None) -> Outcome:
    """Run `steps` greedily; only rank 0 samples, and scores those of `targets`."""
    outcome = Outcome(weight_bytes=engine.model.weight_bytes, is_native=engine.model.is_native)
    before = engine.collective.count

    def sample(logits: Tensor, sids: list[int]) -> list[int]:
        for sid, row in zip(sids, logits, strict=True):
            outcome.logits.setdefault(sid, []).append(row.clone())
        return rejected(greedy(logits, sids), sids, step.change)

    for step in steps:
        scoring = {row.sid: targets[row.sid] for row in step.change.rows if targets and row.sid in targets}
        ran = run(engine, step, sample, scoring)
        outcome.checksums.append(ran.checksum)
        for sid, token in zip(ran.sids, ran.tokens, strict=True):
            outcome.tokens.setdefault(sid, []).append(token)
        for sid, scored in ran.scores.tokens.items():
            outcome.scored.setdefault(sid, []).extend(scored)
    outcome.collectives = engine.collective.count - before
    outcome.left_over = engine.store.used_tokens
    return outcome


real_mmap = mmap.mmap
LARGE_PAGE = memory.LARGE_PAGE


def _limited_mmap(most: int, descriptor: int, size: int, **options: Any) -> mmap.mmap:
    if size > most:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return real_mmap(descriptor, size, **options)


class _Rank:
    """The process's side: each public method is a request."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.collective: Collective | None = None
        self.abort = Abort()
        self.engine: Engine | None = None

    def join(self, file: str, world_size: int, refuses: int | None) -> str:
        """A new group, in which rank `refuses` will share no memory; an engine that is loaded goes on in it."""
        if self.collective is not None:
            self.collective.close()
        self.abort = Abort()
        store = dist.PrefixStore("group", dist.FileStore(file, world_size))
        shared = self.rank != refuses
        self.collective = rendezvous.join(store, self.rank, world_size, "cpu", self.abort, shared)
        if self.engine is not None and self.engine.collective.world_size == world_size:
            self.engine.join(self.collective)
        return type(self.collective).__name__

    def run(self, job: Callable[..., Any], *arguments: Any) -> Any:
        """`job` of this rank's collective: a function that can be imported."""
        return job(self.collective, *arguments)

    def load(
        self,
        folder: Path,
        dtype: str,
        quant: str | None = None,
        dequantize: bool = False,
        shares: tuple[int, ...] = (),
        kv_type: str | None = None,
    ) -> int:
        """Load a model; the bytes of this rank's weights."""
        assert self.collective is not None
        options = {"dtype": dtype, "quant": quant, "dequantize": dequantize, "shares": shares, "kv_type": kv_type}
        model = load(folder, collective=self.collective, **options)
        self.engine = Engine(model, SlabStore(model.cache_layout, 4096), self.collective)
        return model.weight_bytes

    def slab_bytes(self, length: int) -> int:
        """Bytes of a slab on this rank."""
        assert self.engine is not None
        assert isinstance(self.engine.store, SlabStore)
        return length * self.engine.store.layout.bytes_per_token

    def limit_mappings(self, most: int | None) -> None:
        """The kernel refuses to map more than `most` bytes at once for KV memory, as beyond RLIMIT_AS; None ends it."""
        memory.mmap.mmap = real_mmap if most is None else functools.partial(_limited_mmap, most)
        memory.LARGE_PAGE = LARGE_PAGE if most is None else 1  # the small slabs of a tiny model are mapped too

    def know(self, pixels: dict[str, bytes]) -> None:
        """The pixels of images, by digest: rank 0's alone count."""
        assert self.engine is not None and self.engine.images is not None
        self.engine.images.pixels = dict(pixels) if self.rank == 0 else {}

    def play(self, steps: list[GenerateStep], targets: dict[int, ScoreTarget] | None = None) -> Outcome:
        assert self.engine is not None
        return play(self.engine, steps, targets)

    def repeat(self, command: GenerateStep, times: int) -> Outcome:
        """One command that rank 0 lets go on until there were `times` forwards."""
        assert self.engine is not None
        outcome, before = Outcome(), self.engine.collective.count
        more = True
        with self.engine.step(command) as step:
            while more:
                forward = step.forward()
                tokens = greedy(forward.logits, forward.sids) if self.rank == 0 else []
                more = step.agree(tokens, more=step.forwards < times)
                for sid, token in zip(forward.sids, step.tokens, strict=True):
                    outcome.tokens.setdefault(sid, []).append(token)
        assert step.forwards == times
        outcome.checksums, outcome.collectives = [step.checksum], self.engine.collective.count - before
        return outcome

    def sample_fails(self, step: GenerateStep) -> tuple[str, int]:
        """The error of a step whose sampler raises, on this rank, and how many collectives the step took."""
        assert self.engine is not None

        def broken(logits: Tensor, sids: list[int]) -> list[int]:
            raise ValueError("no such grammar")

        before = self.engine.collective.count
        try:
            outcome = str(run(self.engine, step, broken).tokens)
        except ValueError as error:
            outcome = str(error)
        return outcome, self.engine.collective.count - before


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    state = _Rank(rank)
    while (request := pipe.recv()) is not None:
        name, arguments = request
        try:
            pipe.send((True, getattr(state, name)(*arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


class RankGroup:
    """Up to `size` processes; the first `n` of them form a group of n."""

    def __init__(self, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._folder, self._groups, self.members = folder, 0, 0
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def form(self, members: int, refuses: int | None = None) -> list[str]:
        """The first `members` processes join a new group; models that were loaded for this size stay.

        Memory is shared unless rank `refuses` will not; what carries the group is returned for each rank.
        """
        self._groups += 1
        self.members = members
        return self.ask("join", str(self._folder / f"rendezvous-{self._groups}"), members, refuses)

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """The same request to every member at once; their answers by rank. Raises what any of them raised."""
        self.tell(name, *arguments)
        return self.answers(range(self.members))

    def tell(self, name: str, *arguments: Any) -> None:
        """The request alone."""
        for pipe in self._pipes[: self.members]:
            pipe.send((name, arguments))

    def answers(self, ranks: Iterable[int]) -> list[Any]:
        """The answers of these ranks. Raises the first error of any of them."""
        answers = [self._pipes[rank].recv() for rank in ranks]
        for rank, (fine, content) in zip(ranks, answers, strict=True):
            if not fine:
                raise AssertionError(f"rank {rank}: {content}")
        return [content for _, content in answers]

    def pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def stop(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # a test may have killed it
                pipe.send(None)
        for process in self._processes:
            process.join(40)
