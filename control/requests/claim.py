"""A leader takes requests: new ones, those of its replica's earlier epochs, and those of a replica that is gone."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from control.keys import ReplicaKeys
from control.messages import encode
from control.redis.connection import Call, read
from control.replicas.lease import Lease, granted


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request that the leader now owns. Its parameters and its log are read outside scripts: see token_log.py.

    `seq` counts the entries that were emitted before (by an earlier epoch, or before a loss of data); the leader goes
    on after them with the `open` choices that have not ended. `attempts` counts the epochs that have had it, this one
    included. Times are the server's clock: `claimed_ms` that of its first claim, `first_ms` that of its first token, 0
    before it.
    """

    rid: str
    tenant: str
    priority: str
    attempts: int
    deadline_ms: int
    seq: int
    open: int
    claimed_ms: int
    enqueued_ms: int = 0
    first_ms: int = 0


@dataclass(frozen=True, slots=True)
class Claims:
    """`bell` is the id from which an idle leader waits with XREAD: nothing rung after this claim is missed.

    `more`: the call ended at its bound, and another one may find more at once. `skip` is the next claim's.
    """

    requests: list[Claimed]
    bell: str
    more: bool = False
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Adopted:
    """One batch of what was delivered before. Where there may be `more`, the next batch begins `after` this place."""

    requests: list[Claimed]
    bell: str
    after: str
    more: bool


ANY_TOKENS = 1 << 40
"""Room without a bound; far below where Lua's numbers lose their last digit."""


def claim(
    lease: Lease,
    room_sequences: int,
    room_tokens: int,
    ahead_tokens: int = ANY_TOKENS,
    skip: int = 0,
    guests: int = 0,
    sated: Sequence[str] = (),
) -> Call[Claims]:
    """Take waiting requests while they fit: classes in order, then the tenant that was served least.

    Each choice of a request takes room. A request is taken where its first choice fits, and the others wait for theirs
    at the leader. Where nothing more fits, up to `guests` requests are taken of flows that are not `sated` ("class
    tenant" each): the leader takes places for them from the flows that have more than their share.

    The head of a queue that does not fit stops the claim, so that nothing small overtakes it for ever. After
    `ahead_tokens` prompt tokens no further request is taken: what a leader can't prefill soon is better off in the
    queue, where classes, fairness, other replicas and a cancel still reach it. Running the same Call again is harmless.
    A request whose tokens came from other weights than the lease's is left to replicas that have them, or ends with an
    error where none is known; `skip` is what the last claim returned, so that such requests hide no others. Raises
    Lost, Fenced or Poisoned.
    """
    keys = lease.keys
    model = lease.model_keys
    args = (lease.token, model.base, lease.replica, secrets.token_hex(8), room_sequences, room_tokens)
    args += (ahead_tokens, lease.weights, skip, guests, encode(list(sated)))

    def parse(reply: list[Any]) -> Claims:
        bell, requests, more, skip = granted(reply)
        return Claims([_claimed(request) for request in requests], bell, bool(more), int(skip))

    return Call("claim", (keys.lock, keys.epoch, keys.poison, keys.claim, model.bell), args, parse)


def adopt(lease: Lease, after: str = "") -> Call[Adopted]:
    """Take the next batch of what was delivered to this replica and has not ended, room or not.

    All batches, one after the other: on a new epoch, and after RedisUnavailable, when a claim's answer may have been
    lost for good. Running the same Call again is harmless. Raises Lost, Fenced or Poisoned.
    """
    keys = lease.keys
    model = lease.model_keys
    args = (lease.token, model.base, lease.replica, after, lease.weights)
    return Call("adopt", (keys.lock, keys.epoch, keys.poison, model.bell), args, _adopted)


def takeover(lease: Lease, other_replica: str, after: str = "") -> Call[Adopted]:
    """Take the next batch of what another replica left behind, if its lock is absent. If it left anything its epoch
    moves on, so that it wakes up fenced.

    Raises Lost, Fenced or Poisoned.
    """
    keys = lease.keys
    model = lease.model_keys
    other = ReplicaKeys(lease.model, other_replica)
    named = (keys.lock, keys.epoch, keys.poison, keys.claim, model.bell, other.lock, other.epoch)
    args = (lease.token, model.base, lease.replica, secrets.token_hex(8), other_replica, after, lease.weights)
    return Call("takeover", named, args, _adopted)


def _adopted(reply: list[Any]) -> Adopted:
    bell, requests, after, more = granted(reply)
    return Adopted([_claimed(request) for request in requests], bell, after, bool(more))


def _claimed(fields: list[Any]) -> Claimed:
    rid, tenant, priority, *numbers = fields
    return Claimed(rid, tenant, priority, *map(int, numbers))


Inheritance = Literal["free", "stays", "waits", "inherited"]
"""Of the suspects of a replica that is gone: there are none; they wait for their own replica; they wait until another
replica has ended its trial; the caller tries them."""


def note_suspects(lease: Lease, docket: str, suspects: Collection[str], cleared: Collection[str]) -> Call[None]:
    """Keep `docket` for the replica's next leader, and mark the requests in their hashes.

    The docket is the crash record: the requests of steps that crashed, and the suspects (JSON; "" to forget it).

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
