"""A log that a failover has set back is brought to what a client was given before anything else is read from it.

It is compared, appended to and built anew in pages: no call takes long, however long the log is.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from control.errors import LogConflict, RedisUnavailable
from control.keys import ModelKeys
from control.messages import FinishReason, LogEntry, encode
from control.redis.connection import Call, Steps, read
from control.requests.follow import not_found
from control.requests.token_log import PAGE_ENTRIES, WRITE_ENTRIES, encode_entry, ended_in, read_log, stage, tokenless

Repaired = Literal["same", "appended", "replaced"]
"""`appended`: the log was shorter. `replaced`: it said something else, and the request runs on from the new one."""

_TRIES = 100
"""A leader or another API process may change the log between two calls; each time it is looked at again."""


@dataclass(frozen=True)
class _LogState:
    """The request as it was read. `seq` is the one of its log's last entry."""

    state: str
    choices: int
    seq: int
    repaired_by: str

    @property
    def live(self) -> bool:
        return self.state in ("queued", "running")


def repair(model: str, rid: str, api: str, tenant: str, entries: Sequence[LogEntry]) -> Steps[Repaired]:
    """Make the log begin with `entries`, which count from seq 1 without a gap: what `api` has of the request.

    A request all of whose choices end in them is ended. Raises RequestNotFound if it is gone or another tenant's,
    LogConflict where another api's client was given something else and its log stands, and RedisUnavailable.
    """
    return (yield from _Repair(model, rid, api, tenant, entries).steps())


class _Repair:
    def __init__(self, model: str, rid: str, api: str, tenant: str, entries: Sequence[LogEntry]) -> None:
        self._model = model
        self._rid = rid
        self._api = api
        self._tenant = tenant
        self._entries = entries
        self._have = len(entries)  # entries may grow meanwhile
        self._keys = ModelKeys(model)
        self._appended = False

    def steps(self) -> Steps[Repaired]:
        have = self._have
        for _ in range(_TRIES):
            log_state: _LogState = yield self._look()
            agrees = yield from self._agrees(min(log_state.seq, have))
            if agrees and log_state.seq > have:
                return "appended" if self._appended else "same"
            if agrees and (log_state.live or log_state.seq == have):
                is_done = yield from self._append(log_state)
            else:
                is_done = yield from self._replace(log_state)
                if is_done:
                    return "replaced"
            if is_done:
                return "appended" if self._appended else "same"
        raise RedisUnavailable(f"The token log of {self._rid} changes faster than it can be repaired; try again later")

    def _look(self) -> Call[_LogState]:
        def parse(reply: list[str | None]) -> _LogState:
            state, tenant, choices, seq, repaired_by = reply
            if state is None or tenant != self._tenant:
                raise not_found(self._rid)
            return _LogState(state, int(choices or 1), int(seq or 0), repaired_by or "")

        fields = ("state", "tenant", "n", "seq", "repaired_by")
        return read("HMGET", self._keys.request(self._rid), *fields, parse=parse)

    def _agrees(self, count: int) -> Steps[bool]:
        """True if the log's first `count` entries equal the api's."""
        at = 0
        while at < count:
            page: list[LogEntry] = yield read_log(self._model, self._rid, at, min(PAGE_ENTRIES, count - at))
            if not page or not all(map(_equal, page, self._entries[at : at + len(page)])):
                return False
            at += len(page)
        return True

    def _append(self, log_state: _LogState) -> Steps[bool]:
        """Append what is missing, and end a request that is whole then; False where the log has moved meanwhile."""
        have = self._have
        end = ""
        at = log_state.seq
        if log_state.live:
            end = yield from self._end(log_state)
        while True:
            page = self._entries[at : min(have, at + WRITE_ENTRIES)]
            whole = at + len(page) == have
            if not page and not end:
                return True
            args = (self._keys.base, self._rid, self._tenant, at, tokenless(page), ended_in(page))
            texts = (encode_entry(entry) for entry in page)
            names_of_keys = (self._keys.request(self._rid), self._keys.log(self._rid))
            moved = yield Call("repair_append", names_of_keys, (*args, end if whole else "", *texts), self._moved)
            if moved:
                return False
            self._appended |= bool(page)
            at += len(page)
            if whole:
                return True

    def _end(self, log_state: _LogState) -> Steps[str]:
        """The end of the request, if all of its choices end in what the API process has; else ''."""
        ended: set[int] = set()
        finishes: set[FinishReason] = set()
        for at in range(0, self._have, PAGE_ENTRIES):
            for entry in self._entries[at : min(self._have, at + PAGE_ENTRIES)]:
                if entry.finish is not None:
                    ended.add(entry.choice)
                    finishes.add(entry.finish)
            yield None
        if len(ended) < log_state.choices:
            return ""
        return "cancelled" if "cancelled" in finishes else "expired" if "expired" in finishes else "finished"

    def _replace(self, log_state: _LogState) -> Steps[bool]:
        """Put what the api has in the log's place; False where the log has moved meanwhile."""
        if log_state.repaired_by not in ("", self._api):
            raise LogConflict(self._rid, log_state.repaired_by)
        have = self._have
        repair_id = secrets.token_hex(8)
        staged = self._keys.staged(self._rid, repair_id)
        end = (yield from self._end(log_state)) if log_state.live else ""
        without, ended = yield from stage(staged, self._entries, have)
        ends = [] if log_state.live else (yield from self._further_ends({int(choice) for choice in ended.split()}))
        args = (self._keys.base, self._rid, self._tenant, self._api, repair_id, log_state.state, log_state.seq)
        names_of_keys = (self._keys.request(self._rid), self._keys.log(self._rid), staged)
        moved = yield Call("repair_replace", names_of_keys, (*args, have, without, ended, end, *ends), self._moved)
        return not moved

    def _further_ends(self, ended: set[int]) -> Steps[list[Any]]:
        """The ends in the log of choices whose end the API process does not have."""
        ends: list[Any] = []
        at = 0
        while page := (yield read_log(self._model, self._rid, at)):
            for entry in page:
                if entry.finish is not None and entry.choice not in ended:
                    ended.add(entry.choice)
                    cause = encode((entry.choice, None, entry.finish, entry.cause or entry.finish)).decode()
                    ends += [entry.choice, cause.removeprefix("[")]
            at = page[-1].seq
        return ends

    def _moved(self, reply: list[Any]) -> bool:
        if reply[0] == "ABSENT":
            raise not_found(self._rid)
        if reply[0] == "OTHER":
            raise LogConflict(self._rid, reply[1])
        return reply[0] == "MOVED"


def _equal(logged: LogEntry, other: LogEntry) -> bool:
    """Sequence number, choice, token and end are what an entry is."""
    logged_fields = logged.seq, logged.choice, logged.token, logged.finish
    return logged_fields == (other.seq, other.choice, other.token, other.finish)
