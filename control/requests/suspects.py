"""The model's docket: which requests were in a step that crashed, and which are suspected, beyond a leader's death."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from control.keys import ReplicaKeys
from control.redis.connection import Call, read
from control.replicas.lease import Lease, granted

Inheritance = Literal["free", "stays", "waits", "inherited"]
"""Of the suspects of a replica that is gone: there are none; they wait for their own replica; they wait until another
replica has ended its trial; the caller tries them."""


def note_suspects(lease: Lease, docket: str, suspects: Collection[str], cleared: Collection[str]) -> Call[None]:
    """Keep `docket` (JSON, "" to forget it) for the replica's next leader, and mark the requests in their hashes.

    It takes the place of the dockets that the replica inherited, too. Raises Lost or Fenced.
    """
    keys = lease.keys
    model = lease.model_keys

    def parse(reply: list[str]) -> None:
        granted(reply)

    args = (lease.token, model.base, lease.replica, docket, len(suspects), *suspects, *cleared)
    return Call("suspect", (keys.lock, keys.epoch, model.docket, model.trial), args, parse)


def inherit(lease: Lease, other_replica: str) -> Call[Inheritance]:
    """Before a takeover from another replica: its suspects stay with it, or become the caller's to try.

    Raises Lost or Fenced.
    """
    keys = lease.keys
    model = lease.model_keys
    other = ReplicaKeys(lease.model, other_replica)

    def parse(reply: list[Inheritance]) -> Inheritance:
        return granted(reply)[0]

    named = (keys.lock, keys.epoch, model.docket, model.trial, model.weights, other.lock, other.status, other.poisons)
    return Call("inherit", named, (lease.token, model.base, lease.replica, other_replica), parse)


def read_dockets(lease: Lease) -> Call[dict[str, str]]:
    """The docket that the replica's leaders wrote last, and those that it inherited, by replica; none where "" is."""
    prefix = f"{lease.replica}/"

    def parse(reply: dict[str, str]) -> dict[str, str]:
        mine = {name.removeprefix(prefix): text for name, text in reply.items() if name.startswith(prefix)}
        return mine | ({lease.replica: reply[lease.replica]} if lease.replica in reply else {})

    return read("HGETALL", lease.model_keys.docket, parse=parse)
