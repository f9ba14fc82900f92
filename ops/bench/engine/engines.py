"""Greedy decoding of a batch, timed step by step: by Furrow's engine and by transformers' generate."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from control.commands import BatchChange, GenerateStep, StepRow
from control.messages import Sampling
from ops.bench.peers.loops.transformers_generate import generate
from worker.collective import Collective, Solo
from worker.engine.step import Engine
from worker.kv.base import CacheLayout
from worker.kv.stores import store_for
from worker.models.loading import load
from worker.repository.files import ModelFiles
from worker.repository.validation import context_length
from worker.sampling.sampler import StepSampler
from worker.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Decoded:
    """`seconds[0]` is the prompt and the first token, each further one a step; `tokens` is by sequence."""

    seconds: list[float]
    tokens: list[list[int]]


SEQUENCES = 256
"""Sequences whose recurrent states have room beside the tokens that are asked for."""


class Furrow:
    """The engine and sampler as a leader uses them, without Redis; one rank of a group where `collective` is given."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        device: str,
        kv_tokens: int,
        quant: str | None = None,
        kv_type: str | None = None,
        collective: Collective | None = None,
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        files = ModelFiles(config=config, weights=sorted(folder.glob("*.safetensors")), folder=folder)
        self._collective = collective or Solo()
        model = load(files, collective=self._collective, dtype=dtype, quant=quant, kv_type=kv_type, device=device)
        assert isinstance(model.cache_layout, CacheLayout)
        room = kv_tokens + SEQUENCES * model.cache_layout.state_tokens
        store = store_for(model.cache_layout, room, context_length(config), self._collective.world_size)
        self._engine = Engine(model, store, self._collective)
        self.weight_bytes = model.weight_bytes
        self._engine.prepare()
        self._next = 0
        self._running: list[int] = []

    def decode(self, prompts: list[list[int]], count: int) -> Decoded:
        """`count` tokens for each prompt, all in one batch; on every rank of a group alike."""
        sids = list(range(self._next, self._next + len(prompts)))
        asked = dict(zip(sids, prompts, strict=True))
        sampling = Sampling(max_tokens=count, temperature=0.0, seed="0")
        sequences = {sid: Sequence(rid="", choice=0, prompt=asked[sid], sampling=sampling, sid=sid) for sid in sids}
        sampler = StepSampler()
        # A step ends when its tokens are here; the device may be at work on the next one by then.
        seconds, before = [], time.perf_counter()
        for step in range(count):
            command = self._command(asked if step == 0 else {}, step + 1)
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

    def _command(self, asked: dict[int, list[int]], seq: int) -> GenerateStep:
        """New prompts take the place of what ran before; without any, every sequence decodes by itself."""
        rows = [StepRow(sid, tokens, 0, True) for sid, tokens in asked.items()]
        change = BatchChange(rows=rows, left=self._running if asked else [])
        return GenerateStep(epoch=1, seq=seq, model_id="bench", change=change)


class Transformers:
    """`generate` with its default cache and attention."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model, self._device = model.to(device).eval(), device

    def decode(self, prompts: list[list[int]], count: int) -> Decoded:
        """As Furrow's; the prompts have equal lengths, so that nothing is padded."""
        began, stamps, tokens = generate(self._model, self._device, prompts, count)
        return Decoded([after - before for before, after in pairwise([began, *stamps])], tokens)
