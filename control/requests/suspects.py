"""What a leader remembers of a crash beyond its own death: who was in the step, and who is suspected."""

from __future__ import annotations

from collections.abc import Collection

from control.connection import Call, read
from control.lease import Lease, granted


def note_suspects(lease: Lease, docket: str, suspects: Collection[str], cleared: Collection[str]) -> Call[None]:
    """Keep `docket` (JSON, "" to forget it) for the replica's next leader, and mark the requests in their hashes.

    Raises Lost or Fenced.
    """
    keys, base = lease.keys, lease.model_keys.base

    def parse(reply: list[str]) -> None:
        granted(reply)

    args = (lease.token, base, docket, len(suspects), *suspects, *cleared)
    return Call("suspect", (keys.lock, keys.epoch, keys.suspects), args, parse)


def read_suspects(lease: Lease) -> Call[str]:
    """The docket that the replica's leaders wrote last; "" where there is none."""

    def parse(reply: str | None) -> str:
        return reply or ""

    return read("GET", lease.keys.suspects, parse=parse)
