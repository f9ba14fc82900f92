"""Exit statuses by which a rank process tells its agent why it ended."""

from __future__ import annotations

import signal

STOPPED = 0
"""The process was asked to stop."""
REFUSED = 65
"""The model, the device or a setting can't be used; trying again with the same assignment won't help."""
LOAD_FAILED = 66
"""The group could not be formed or the model could not be loaded; another try may help."""
STUCK = 71
"""The deadman ended the process: its epoch was over and its main thread did not leave."""


FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})
"""Signals by which a process dies of itself. SIGKILL is none: it may be the memory killer's, or anybody's."""


def poison_kind(status: int) -> str:
    """The kind of poison for the end of a rank: `crashed` by its own fault, else `exited`."""
    is_own = -status in FAULTS if status < 0 else status not in (STOPPED, REFUSED, LOAD_FAILED, STUCK)
    return "crashed" if is_own else "exited"


def describe(status: int) -> str:
    """`status` as an operator would say it; a negative one is the signal that killed the process."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    names = {STOPPED: "stopped", REFUSED: "refused its assignment", LOAD_FAILED: "could not load", STUCK: "was stuck"}
    return names.get(status, f"exited with status {status}")
