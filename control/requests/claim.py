"""A leader takes requests: new ones, those of its replica's earlier epochs, and those of a replica that is gone."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from control.connection import Call
from control.keys import ReplicaKeys
from control.lease import Lease, granted
from control.messages import GenerationRequest, LogEntry, decode_request

decode_entry = msgspec.json.Decoder(LogEntry).decode


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request that the leader now owns.

    `log` holds what was emitted before (by an earlier epoch, or before a loss of data); the leader goes on after it.
    `attempts` counts the epochs that have had it, this one included; `deadline_ms` is the server's clock.
    """

    rid: str
    params: GenerationRequest
    log: list[LogEntry]
    attempts: int
    deadline_ms: int
    priority: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Claims:
    """`bell` is the id from which an idle leader waits with XREAD: nothing rung after this claim is missed."""

    requests: list[Claimed]
    bell: str


ANY_TOKENS = 1 << 40
"""Room without a bound; far below where Lua's numbers lose their last digit."""


def claim(
    lease: Lease, room_requests: int, room_tokens: int, adopt: bool, ahead_tokens: int = ANY_TOKENS
) -> Call[Claims]:
    """Take waiting requests while they fit: classes in order, then the tenant that was served least.

    The head of a queue that does not fit stops the claim, so that nothing small overtakes it for ever. After
    `ahead_tokens` prompt tokens no further request is taken: what a leader can't prefill soon is better off in the
    queue, where classes, fairness, other replicas and a cancel still reach it. `adopt` first
    takes everything that was delivered to this replica and has not ended, room or not: do it on a new epoch, and after
    RedisUnavailable, when a claim's answer may have been lost for good. Running the same Call again is harmless.
    A request whose tokens came from other weights than the lease's is left to replicas that have them, or ends with an
    error where none is known. Raises Lost, Fenced or Poisoned.
    """
    keys, model = lease.keys, lease.model_keys
    args = (lease.token, model.base, lease.replica, secrets.token_hex(8), room_requests, room_tokens)
    args += (int(adopt), ahead_tokens, lease.weights)
    return Call("claim", (keys.lock, keys.epoch, keys.poison, keys.claim, model.bell), args, _claims)


def takeover(lease: Lease, other_replica: str) -> Call[Claims]:
    """Take what another replica left behind, if its lock is absent. If it left anything its epoch moves on, so that it
    wakes up fenced.

    Raises Lost, Fenced or Poisoned.
    """
    keys, model, other = lease.keys, lease.model_keys, ReplicaKeys(lease.model, other_replica)
    named = (keys.lock, keys.epoch, keys.poison, keys.claim, model.bell, other.lock, other.epoch)
    args = (lease.token, model.base, lease.replica, secrets.token_hex(8), other_replica, lease.weights)
    return Call("takeover", named, args, _claims)


def _claims(reply: list[Any]) -> Claims:
    bell, requests = granted(reply)
    return Claims([_claimed(request) for request in requests], bell)


def _claimed(fields: list[Any]) -> Claimed:
    rid, params, tenant, priority, attempts, deadline, entries = fields
    return Claimed(
        rid=rid,
        params=decode_request(params),
        log=[decode_entry(entry) for entry in entries],
        attempts=int(attempts),
        deadline_ms=int(deadline),
        priority=priority,
        tenant=tenant,
    )
