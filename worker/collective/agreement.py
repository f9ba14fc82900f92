"""Ranks tell each other, through the group's store, whether all are ready for what they can only do together."""

from __future__ import annotations

import time
from collections.abc import Callable

from worker.collective.rendezvous import Store

POLL_S = 0.02
READY, FAILED = b"ready", b"failed"


def all_ready(
    store: Store,
    rank: int,
    world_size: int,
    ready: bool,
    patience_s: float,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Tell the other ranks whether this one is ready, and wait for them. True once all are ready, False if one has
    failed or after `patience_s` seconds. `store` must be fresh. The wait occupies no device, as ranks may load at
    different speeds. An error of `check` ends it."""
    keys = [f"ready/{other}" for other in range(world_size)]
    store.set(keys[rank], (READY if ready else FAILED).decode())
    deadline = time.monotonic() + patience_s
    missing = set(keys)
    while ready and missing:
        for key in sorted(missing):
            if store.check([key]):
                missing.remove(key)
                ready = ready and store.get(key) == READY
        if missing and time.monotonic() > deadline:
            return False
        if missing and ready:
            check()
            time.sleep(POLL_S)
    return ready
