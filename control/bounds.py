"""The numbers that clients and operators may send: one table of their ranges, for HTTP and the command alike.

A number beyond its range is refused before anything is written. So no arithmetic of a process, a script or Redis
meets one that it can't hold.
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_S = 86_400
"""A request lives for a day at most: so do its suspects, its places and what it took of its key's limits."""
_INT32 = 2**31 - 1
_YEAR_9999_S = 253_402_300_799
_LONGEST_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` to `most`; `above`: `least` itself is none of them."""

    least: int | float
    most: int | float
    above: bool = False

    def holds(self, value: float) -> bool:
        """NaN is in no range."""
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        if self.above:
            return f"above {self.least} and at most {self.most}"
        return f"between {self.least} and {self.most}"


LOOKUP = Range(0, 64)
"""Guesses of a step, of a model and of a request."""

REQUEST_NUMBERS: dict[str, Range] = {
    "temperature": Range(0, 5),
    "top_p": Range(0, 1),
    "min_p": Range(0, 1),
    "typical_p": Range(0, 1),
    "top_k": Range(-1, _INT32),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0.01, 100),
    "logit_bias": Range(-100, 100),
    "n": Range(1, 128),
    "best_of": Range(1, 128),
    "max_tokens": Range(0, _INT32),
    "max_completion_tokens": Range(0, _INT32),
    "max_output_tokens": Range(0, _INT32),
    "min_tokens": Range(0, _INT32),
    "logprobs": Range(0, 20),
    "top_logprobs": Range(0, 20),
    "prompt_logprobs": Range(0, 20),
    "truncate_prompt_tokens": Range(-1, _INT32),
    "dry_multiplier": Range(0, 100),
    "dry_base": Range(1, 100),
    "dry_allowed_length": Range(1, 256),
    "dry_penalty_last_n": Range(-1, _INT32),
    "xtc_probability": Range(0, 1),
    "xtc_threshold": Range(0, 1),
    "top_n_sigma": Range(-1, 1000),
    "dynatemp_range": Range(0, 5),
    "dynatemp_exponent": Range(0, 100),
    "seed": Range(-(2**63), 2**64 - 1),
    "timeout": Range(0, LONGEST_S, above=True),
    "deadline": Range(0, _YEAR_9999_S, above=True),
    "on_disconnect": Range(0, LONGEST_S),
    "lookup": LOOKUP,
    "thinking_token_budget": Range(-1, _INT32),
    "budget_tokens": Range(0, _INT32),
    "max_tool_calls": Range(0, _INT32),
    "starting_after": Range(-1, _INT32),
    "limit": Range(1, 100),
    "days": Range(1, 400),
}
"""Ranges for requests and for records that are read back, by the parameter's name."""

FARM_NUMBERS: dict[str, Range] = {
    "tp": Range(1, 1024),
    "replicas": Range(1, 1024),
    "target_wait_s": Range(0, LONGEST_S, above=True),
    "idle_s": Range(1, 2**31 - 1),
    "max_context": Range(16, _INT32),
    "kv_tokens": Range(16, 2**40),
    "lookup": LOOKUP,
    "drain_s": Range(0, LONGEST_S),
    "rpm": Range(0, 2**40),
    "tpm": Range(0, 2**40),
    "max_concurrent": Range(0, 2**40),
    "expires": Range(0, _YEAR_9999_S),
}
"""Ranges for operators' settings, by `furrow` or /farm."""

RANGES = REQUEST_NUMBERS | FARM_NUMBERS


def refusal(name: str, value: float, bounds: Range | None = None) -> str | None:
    """The words of a refusal where `value` is out of the range of `name`; None where it is in it."""
    bounds = bounds or RANGES[name]
    if bounds.holds(value):
        return None
    return f"Invalid value for '{name}': {shown(value)} must be {bounds}."


def shown(value: float) -> str:
    """The number as text, cut where it has very many digits."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}… ({len(text)} digits)"
