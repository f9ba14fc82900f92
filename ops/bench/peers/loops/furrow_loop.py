"""Furrow's scheduler, engine and sampler as a leader runs them, in one process and without Redis: the bare loop."""

from __future__ import annotations

import time

import torch

from control.commands import ErrorReply, GenerateStep
from control.messages import Sampling
from ops.bench.control.stepping import load_command
from ops.bench.peers.engine import Failed, Setup, Stream, Unavailable
from ops.bench.peers.weights import of_furrow
from worker.leader.group_leader import limits_on
from worker.rank.rank_worker import RankWorker
from worker.sampling.sampler import StepSampler
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Sequence

MODEL = "bench"


class FurrowLoop:
    """One rank that is its own leader."""

    def __init__(self, setup: Setup) -> None:
        dtype, quant = of_furrow(setup.weights, setup.device)
        self._rank_worker, self._kv_tokens, self._seq = RankWorker(0, 1, setup.device), setup.kv_tokens, 1
        reply = self._rank_worker.answer(load_command(setup.gguf or setup.folder, MODEL, setup.kv_tokens, dtype, quant))
        if isinstance(reply, ErrorReply):
            raise Unavailable(reply.message)

    def run(self, prompts: list[list[int]], tokens: int) -> list[Stream]:
        """As Loop's."""
        limits = limits_on(self._rank_worker.device)
        scheduler = Scheduler(
            kv_tokens=self._kv_tokens, token_budget=limits.token_budget, max_sequences=limits.max_sequences
        )
        sampler = StepSampler()
        streams = [Stream(time.monotonic()) for _ in prompts]
        for index, prompt in enumerate(prompts):
            sampling = Sampling(max_tokens=tokens, temperature=0.0, seed="0")
            scheduler.add(Sequence(rid=str(index), choice=0, prompt=prompt, sampling=sampling))
        while scheduler.has_work:
            plan = scheduler.schedule()
            rows = plan.to_sample
            self._seq += 1
            with self._rank_worker.step(
                GenerateStep(epoch=1, seq=self._seq, model_id=MODEL, change=plan.change)
            ) as step:
                pending = sampler.begin(rows, step.forward())
                step.run_ahead(pending.on_device)
                step_tokens = pending.wait()
                step.agree(step_tokens.ids)
            if step_tokens.failures:
                raise Failed("; ".join(step_tokens.failures.values()))
            sampled = dict(zip(plan.sampled, step_tokens.ids, strict=True))
            scheduler.update(plan, sampled)
            now = time.monotonic()
            for row in rows:
                streams[int(row.rid)].add(now, sampled[row.sid])
                if len(row.output) == tokens:
                    scheduler.drop(row.sid)
        self._rank_worker.clear()
        return streams


def load(setup: Setup) -> FurrowLoop:
    """As LoadEngine. Raises Unavailable."""
    if setup.tp != 1:
        raise Unavailable("the bare loop has one rank; measure more with furrow-farm")
    if setup.device == "cpu":
        torch.set_num_threads(setup.threads)
    return FurrowLoop(setup)
