"""transformers' continuous batching: its manager and paged attention, driven without HTTP."""

from __future__ import annotations

import time

from transformers import ContinuousBatchingConfig, GenerationConfig

from ops.bench.peers.engine import Failed, Setup, Stream
from ops.bench.peers.loops.transformers_generate import load_model

LOOK_S = 5.0
"""Between looks at whether its thread still lives."""


class Batching:
    """A model and a manager that stays between runs."""

    def __init__(self, setup: Setup) -> None:
        # Its own default takes most of the memory that there is.
        blocks = setup.blocks(ContinuousBatchingConfig().page_size)
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = load_model(setup).init_continuous_batching(
            generation_config=config, continuous_batching_config=ContinuousBatchingConfig(num_blocks=blocks)
        )
        self._manager.start()

    def run(self, prompts: list[list[int]], tokens: int) -> list[Stream]:
        """As Loop's."""
        sent = time.monotonic()
        order = self._manager.add_requests(prompts, max_new_tokens=tokens, record_timestamps=True)
        streams: dict[str, Stream] = {}
        while len(streams) < len(prompts):
            output = self._manager.get_result(timeout=LOOK_S)
            if output is None:
                if not self._manager.is_running():
                    raise Failed("its thread has ended")
            elif output.error is not None:
                raise Failed(output.error)
            elif output.is_finished():
                # Stamped by time.perf_counter, which is the monotonic clock on Linux.
                streams[output.request_id] = Stream(sent, list(output.timestamps or []), output.generated_tokens)
        return [streams[name] for name in order]


def load(setup: Setup) -> Batching:
    """As Load. Raises Unavailable."""
    return Batching(setup)
