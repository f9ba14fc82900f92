"""The series that a rank counts, each with its place in the rank's counters.

Names, labels and buckets of the `vllm:` series are vLLM's, so that its dashboards and scaling rules work.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Series:
    """`cells` numbers from `start` on: one for each of `values` of the label, or of a histogram the counts of its
    buckets, that of greater observations, and their sum. Without `rank` only leaders count it."""

    name: str
    help: str
    kind: Kind
    start: int
    bounds: tuple[float, ...] = ()
    label: str = ""
    values: tuple[str, ...] = ("",)
    rank: bool = False

    @property
    def cells(self) -> int:
        return len(self.bounds) + 2 if self.kind == "histogram" else len(self.values)


ALL: list[Series] = []
PID = 0
"""The cell with the pid of the rank that counts."""


def _series(kind: Kind, name: str, text: str, **options: object) -> Series:
    start = ALL[-1].start + ALL[-1].cells if ALL else PID + 1
    ALL.append(Series(name, text, kind, start, **options))  # type: ignore[arg-type]
    return ALL[-1]


_TO_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_A_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_A_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))[:-2]

REASONS = ("stop", "length", "abort", "error")

RUNNING = _series("gauge", "vllm:num_requests_running", "Requests that the replica runs.")
KV_USAGE = _series("gauge", "vllm:kv_cache_usage_perc", "Part of the KV memory that running sequences hold, 0 to 1.")
PREFIX_QUERIES = _series("counter", "vllm:prefix_cache_queries", "Prompt tokens that were looked up in kept KV.")
PREFIX_HITS = _series("counter", "vllm:prefix_cache_hits", "Prompt tokens whose KV was there already.")
PROMPT_TOKENS = _series("counter", "vllm:prompt_tokens", "Prompt tokens of requests that got their first token.")
GENERATION_TOKENS = _series("counter", "vllm:generation_tokens", "Tokens that Redis took into token logs.")
SUCCESS = _series(
    *("counter", "vllm:request_success", "Requests that ended at the replica, by reason; abort: cancelled or expired."),
    label="finished_reason",
    values=REASONS,
)
TO_FIRST_TOKEN = _series(
    *("histogram", "vllm:time_to_first_token_seconds", "From a request's arrival in the queue to its first token."),
    bounds=_TO_FIRST_TOKEN_S,
)
BETWEEN_TOKENS = _series(
    *("histogram", "vllm:inter_token_latency_seconds", "Between the tokens of a request, as Redis took them."),
    bounds=_A_TOKEN_S,
)
PER_TOKEN = _series(
    *("histogram", "vllm:request_time_per_output_token_seconds", "Mean time of a request's tokens after the first."),
    bounds=_A_TOKEN_S,
)
WHOLE = _series(
    *("histogram", "vllm:e2e_request_latency_seconds", "From a request's arrival in the queue to its end."),
    bounds=_A_REQUEST_S,
)
QUEUED = _series(
    *("histogram", "vllm:request_queue_time_seconds", "From a request's arrival in the queue to its first claim."),
    bounds=_A_REQUEST_S,
)
PREFILL = _series(
    *("histogram", "vllm:request_prefill_time_seconds", "From a request's first claim to its first token."),
    bounds=_A_REQUEST_S,
)
DECODE = _series(
    *("histogram", "vllm:request_decode_time_seconds", "From a request's first token to its end."),
    bounds=_A_REQUEST_S,
)
INFERENCE = _series(
    *("histogram", "vllm:request_inference_time_seconds", "From a request's first claim to its end."),
    bounds=_A_REQUEST_S,
)
REQUEST_PROMPT = _series(
    *("histogram", "vllm:request_prompt_tokens", "Prompt tokens of requests that ended."), bounds=_TOKENS
)
REQUEST_GENERATION = _series(
    *("histogram", "vllm:request_generation_tokens", "Generated tokens of requests that ended."), bounds=_TOKENS
)
STEPS = _series("counter", "furrow_rank_commands", "Commands that the rank has completed.", rank=True)
STEP_SECONDS = _series("counter", "furrow_rank_busy_seconds", "Seconds that the rank's commands took.", rank=True)
FORWARD_SECONDS = _series(
    *(
        "counter",
        "furrow_rank_forward_seconds",
        "Seconds of forwards, each from its first exchange with other ranks on.",
    ),
    rank=True,
)
WAIT_SECONDS = _series(
    *("counter", "furrow_rank_wait_seconds", "Seconds of forwards in which the rank waited for other ranks."), rank=True
)

CELLS = ALL[-1].start + ALL[-1].cells
LAYOUT = hashlib.sha256(repr(ALL).encode()).hexdigest()[:16]
"""Changes with every place of a series: memory with another layout is not read."""
