"""llama.cpp through the llama-cpp-python package: its C interface, all sequences in one batch.

The package's `Llama` class knows one sequence only, so batches are made here; for one stream it does the same calls.
"""

from __future__ import annotations

import time

import llama_cpp
import numpy as np

from ops.bench.peers.engine import Failed, Setup, Stream, Unavailable

BATCH = 2048
"""llama.cpp's own default for the tokens of one call."""


class LlamaCpp:
    """A context with room for `streams` sequences."""

    def __init__(self, setup: Setup) -> None:
        llama_cpp.llama_backend_init()
        gpu = setup.device != "cpu"
        if gpu and not llama_cpp.llama_supports_gpu_offload():
            raise Unavailable("this llama-cpp-python was built without a GPU")
        of_model = llama_cpp.llama_model_default_params()
        of_model.n_gpu_layers = 999 if gpu else 0
        self._model = llama_cpp.llama_model_load_from_file(str(setup.gguf).encode(), of_model)
        if not self._model:
            raise Failed(f"llama.cpp can't load {setup.gguf}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = setup.divided_context, setup.streams
        params.n_batch = BATCH
        params.n_threads = params.n_threads_batch = setup.threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise Failed(f"llama.cpp can't make a context of {params.n_ctx} tokens")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def run(self, prompts: list[list[int]], tokens: int) -> list[Stream]:
        """As Loop's: the prompts in order, then one token of each stream per call."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        streams = [Stream(time.monotonic()) for _ in prompts]
        rows: list[tuple[int, int, int, bool]] = []
        for sid, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                rows.append((sid, position, token, position + 1 == len(prompt)))
                if len(rows) == BATCH:
                    self._step(rows, streams)
                    rows = []
        if rows:
            self._step(rows, streams)
        for index in range(tokens - 1):
            rows = [(sid, len(prompt) + index, streams[sid].tokens[-1], True) for sid, prompt in enumerate(prompts)]
            self._step(rows, streams)
        return streams

    def _step(self, rows: list[tuple[int, int, int, bool]], streams: list[Stream]) -> None:
        """One call; rows are (sequence, position, token, whether it is sampled)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (sid, position, token, sampled) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, sid, sampled
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise Failed(f"llama_decode returned {status}")
        next_tokens = {
            sid: int(
                np.ctypeslib.as_array(
                    llama_cpp.llama_get_logits_ith(self._context, index), (self._vocabulary,)
                ).argmax()
            )
            for index, (sid, _, _, sampled) in enumerate(rows)
            if sampled
        }
        now = time.monotonic()
        for sid, token in next_tokens.items():
            streams[sid].add(now, token)


def load(setup: Setup) -> LlamaCpp:
    """As LoadEngine. Raises Unavailable or Failed."""
    if setup.tp != 1:
        raise Unavailable("llama.cpp is measured with one process")
    return LlamaCpp(setup)
