"""CPU scheduling of a process: a slow or throttled one runs now and then, a stopped one never."""

from __future__ import annotations

import psutil


def context_switches(pid: int) -> int:
    """How often the main thread of a process has given up a processor so far; 0 for one that has ended. A signal that
    stops or continues the thread counts too."""
    try:
        switches = psutil.Process(pid).num_ctx_switches()
    except psutil.Error:
        return 0
    return switches.voluntary + switches.involuntary
