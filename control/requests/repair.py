"""A log that a failover has set back is brought to what a client was given before anything else is read from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from control.connection import Call
from control.errors import LogConflict
from control.keys import ModelKeys
from control.messages import LogEntry
from control.requests.emit import encode_entry
from control.requests.follow import not_found

Repaired = Literal["same", "appended", "replaced"]
"""`appended`: the log was shorter. `replaced`: it said something else, and the request runs on from the new one."""


def repair(model: str, rid: str, api: str, tenant: str, entries: Sequence[LogEntry]) -> Call[Repaired]:
    """Make the log begin with `entries`, which count from seq 1 without a gap: what `api` has of the request.

    A request all of whose choices end in them is ended. Raises RequestNotFound if it is gone or another tenant's, and
    LogConflict where another api's client was given something else and its log stands.
    """
    keys = ModelKeys(model)

    def parse(reply: list[Any]) -> Repaired:
        if reply[0] == "ABSENT":
            raise not_found(rid)
        if reply[0] == "OTHER":
            raise LogConflict(rid, reply[1])
        return reply[1]

    args = (keys.base, rid, tenant, api, *(encode_entry(entry) for entry in entries))
    return Call("repair", (keys.request(rid), keys.log(rid)), args, parse)
