"""An agent's word on a replica that it runs: what heartbeats can't tell, because nobody is there to beat."""

from __future__ import annotations

from typing import Literal

import msgspec

from control.keys import ReplicaKeys
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run, write

AgentState = Literal["starting", "running", "backoff", "draining", "failed", "unplaceable", "stopped"]
"""`failed`: its agent gave it up, and tries again only a new revision. `unplaceable`: no host has room for it now."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`detail` is for the operator: what is going on, or why it is not."""

    state: AgentState = "starting"
    detail: str = ""
    host: str = ""
    attempts: int = 0
    tp: int = 0
    downloaded_bytes: int = 0
    """Of the file that is being downloaded; `download_bytes` are all of it, 0 where there is no download."""
    download_bytes: int = 0


def write_status(
    client: SyncRedis, model: str, replica: str, state: AgentState, detail: str, **fields: str | int
) -> None:
    """Set state and detail, and the other fields that are given."""
    words = ["state", state, "detail", detail, *(word for pair in fields.items() for word in pair)]
    run(client, write("HSET", ReplicaKeys(model, replica).status, *words, parse=int))


def clear_status(client: SyncRedis, model: str, replica: str) -> None:
    """The replica does not run on any host any more."""
    run(client, read("DEL", ReplicaKeys(model, replica).status, parse=int))


def status_of(model: str, replica: str) -> Call[Status | None]:
    """None while no agent has the replica."""

    def parse(reply: dict[str, str]) -> Status | None:
        return msgspec.convert(reply, Status, strict=False) if reply else None

    return read("HGETALL", ReplicaKeys(model, replica).status, parse=parse)
