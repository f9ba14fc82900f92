"""The times of a host's supervisor. An operator or a test may set those of `Limits`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from worker.detectors import AGENT_ABSENT_S

PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before the n-th start in a row of an agent that ended soon."""
FAILURES = 3
"""Agents in a row that ended soon, after which the supervisor's own build is started."""
STEADY_S = 5.0
"""An agent that lived for this time is started again without a pause."""
REPLACE_S = 10.0
"""Time for an agent to exit by itself when it is replaced."""
GAP_S = 5.0
"""If the supervisor itself did not run for this time, silence is no evidence."""
ABSENT_VARIABLE = "FURROW_AGENT_ABSENT"
"""Environment variable: seconds without an agent after which the host's ranks end."""


@dataclass
class Limits:
    """In seconds."""

    absent_s: float = AGENT_ABSENT_S
    """Time without a working agent after which the host's ranks end."""
    stop_s: float = 85.0
    """Time for all processes to end after SIGTERM before they are killed."""


def limits_from_environment() -> Limits:
    """Raises ValueError for a number that is none, or not positive."""
    text = os.environ.get(ABSENT_VARIABLE) or str(Limits.absent_s)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{ABSENT_VARIABLE}={text!r} is not a positive number of seconds")
    return Limits(absent_s=seconds)
