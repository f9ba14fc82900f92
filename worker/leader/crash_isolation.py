"""The isolation of a request that crashes its group. Without an earlier crash it costs nothing.

The crash record says which requests may have crashed a group, and the next trial. It is written before a step that may
crash, because the crash may end the leader too. The next epoch reads it with the end of the last one and the progress
of each request. Suspects stay with their replica: with a record for each replica two of them took a crashing request
from each other without end.

Requests in the step of a second crash, without progress since their adoption, are suspects. Suspects are tried in
halves. A half that crashes is halved again; one that makes progress is cleared. With one culprit among n suspects at
most ceil(log2 n) crashes follow the first two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import structlog

from control import requests
from control.messages import encode
from control.redis.connection import Call
from control.replicas import health
from control.replicas.health import Poison
from control.replicas.lease import Lease
from control.requests import Claimed
from worker.leader.request import RunningRequest

log = structlog.get_logger()

OWN_FAULTS = frozenset({"step_failed", "forward_failed", "crashed"})
"""Kinds of poison that have their cause inside the group. Every other kind (a kill, a hang, a lost peer) may come
from outside, whatever ran just then."""
LONE_KILLS = 3
"""Ends of other kinds that make a request a dead letter: each in a step of its own, without progress between."""
PROOF_TOKENS = 2
"""Tokens of each choice that clear a request: the first comes from a prefill, only the second from a decode."""


class CrashRecord(msgspec.Struct, frozen=True):
    """The state of a crash isolation. Rids are in order of adoption."""

    epoch: int = 0
    """The epoch whose step `tried` describes."""
    tried: dict[str, int] = {}
    """Requests in that step that had not got on, with the seq by which each will have."""
    alone: bool = False
    """True if all rows of that step belonged to one request."""
    crashed_together: list[str] = msgspec.field(name="guilty", default_factory=list)
    """The smallest set that is known to have crashed together."""
    rest: list[str] = []
    """Suspects to be tried afterwards, of whom nothing else is known."""
    lone: dict[str, int] = {}
    """The number of times that a request was alone when its group was ended by what may have come from outside."""

    def joined(self, other: CrashRecord) -> CrashRecord:
        """With what `other` knows: the suspects that another replica left. Both have been judged."""
        suspects = set(self.suspects)
        first = [rid for rid in other.crashed_together if rid not in suspects]
        later = [rid for rid in other.rest if rid not in suspects]
        merged = {rid: max(self.lone.get(rid, 0), other.lone.get(rid, 0)) for rid in self.lone | other.lone}
        if not self.suspects:
            return msgspec.structs.replace(self, crashed_together=first, rest=later, lone=merged)
        return msgspec.structs.replace(self, rest=[*self.rest, *first, *later], lone=merged)

    @property
    def suspects(self) -> list[str]:
        return [*self.crashed_together, *self.rest]

    @property
    def trial(self) -> list[str]:
        """The suspects to run next, alone: half of those that crashed together, else all the others."""
        if len(self.crashed_together) > 1:
            return self.crashed_together[: len(self.crashed_together) // 2]
        return self.crashed_together or self.rest

    def before_step(self, epoch: int, tried: dict[str, int], alone: bool) -> CrashRecord:
        """As it must be written down before a step of `epoch` with these rows."""
        return msgspec.structs.replace(self, epoch=epoch, tried=tried, alone=alone)

    def without(self, rids: Collection[str]) -> CrashRecord:
        """`rids` have made progress, or have ended: they are no suspects any more."""
        return CrashRecord(
            epoch=self.epoch,
            tried={rid: goal for rid, goal in self.tried.items() if rid not in rids},
            alone=self.alone,
            crashed_together=[rid for rid in self.crashed_together if rid not in rids],
            rest=[rid for rid in self.rest if rid not in rids],
            lone={rid: count for rid, count in self.lone.items() if rid not in rids},
        )

    def judged(self, end: str | None, seqs: Mapping[str, int]) -> tuple[CrashRecord, str | None]:
        """The record after the end of `epoch`, and the request that becomes a dead letter, if one does. The same facts
        give the same result.

        `end` is the kind of the epoch's poison. None means that it ended without (a lost lock, an orderly stop): no
        request is suspected, and a trial is repeated. `seqs` holds the last seq of each adopted request; those that are
        missing have ended.
        """
        moved = [rid for rid, goal in self.tried.items() if seqs.get(rid, goal) >= goal]
        gone = [rid for rid in self.suspects if rid not in seqs]
        stuck = [rid for rid in self.tried if rid not in moved]
        record = self.without([*moved, *gone])
        if end is None or not stuck:
            return msgspec.structs.replace(record, tried={}), None
        suspects = [rid for rid in record.suspects if rid not in stuck]
        if len(stuck) > 1 or not self.alone:
            return CrashRecord(crashed_together=stuck, rest=suspects, lone=record.lone), None
        [culprit] = stuck
        count = record.lone.get(culprit, 0) + (end not in OWN_FAULTS)
        if end in OWN_FAULTS or count >= LONE_KILLS:
            return CrashRecord(rest=suspects, lone=record.without(stuck).lone), culprit
        return CrashRecord(crashed_together=stuck, rest=suspects, lone=record.lone | {culprit: count}), None


decode_record = msgspec.json.Decoder(CrashRecord).decode


class CrashIsolation:
    """Judges the epoch before this one, and then says step by step who may run."""

    def __init__(self, lease: Lease, run: Callable[[Call[Any]], Any]) -> None:
        """`run` runs a call, and waits while Redis is away."""
        self._lease = lease
        self._run = run
        self._record = CrashRecord()
        self._marked: set[str] = set()
        self._goals: dict[str, int] = {}
        """Requests that were adopted and have not got on yet, with the seq by which they will have."""
        self._on_trial: list[str] = []
        self.active = False
        """True if only those on trial may run, and nothing new is claimed."""

    @property
    def watching(self) -> bool:
        """True if a crash now would be blamed on a request, so that steps must be recorded."""
        return bool(self._goals)

    @property
    def trying(self) -> bool:
        """True if a step of a trial was run in this epoch."""
        return self.active and self._record.epoch == self._lease.epoch

    def open(self, adopted: list[Claimed]) -> list[Claimed]:
        """Judge how the records' epochs ended; bury those that they blame. Returns `adopted` without those."""
        records: dict[str, str] = self._run(requests.read_dockets(self._lease))
        adopted = self._judge(records, adopted)
        if records and not adopted:
            self._write("")
        self.active = bool(self._record.suspects)
        if self.active:
            suspects = len(self._record.suspects)
            together = len(self._record.crashed_together)
            log.warning("isolating a crash", suspects=suspects, crashed_together=together, action="isolate")
        return adopted

    def inherit(self, replica: str, claimed: list[Claimed]) -> list[Claimed]:
        """Judge the record of a replica that was given up, among whose requests `claimed` are; as `open`."""
        records: dict[str, str] = self._run(requests.read_dockets(self._lease))
        records.pop(self._lease.replica, None)
        claimed = self._judge(records, claimed)
        self.active = bool(self._record.suspects)
        self._on_trial = []
        if not claimed and not self._goals:
            self._write("")
        log.warning("took over a crash record", gone=replica, active=self.active, action="isolate")
        return claimed

    def _judge(self, records: dict[str, str], claimed: list[Claimed]) -> list[Claimed]:
        """Make each record part of this one; `claimed` are those that may be in them. Returns them without the dead."""
        seqs = {request.rid: request.seq for request in claimed}
        for replica, text in sorted(records.items()):
            record = decode_record(text)
            self._marked |= {*record.suspects, *record.tried}
            poisons: list[Poison] = self._run(health.poison_history(self._lease.model, replica))
            end = next((poison for poison in poisons if poison.epoch == record.epoch), None)
            judged, culprit = record.judged(end.kind if end else None, seqs)
            self._record = self._record.joined(judged)
            if culprit is not None and end is not None:
                self._bury(culprit, end)
                del seqs[culprit]
        return [request for request in claimed if request.rid in seqs]

    def watch(self, adopted: Collection[Claimed]) -> None:
        """Watch requests that were adopted or taken over: a crash before their progress makes them suspects."""
        self._goals |= {request.rid: request.seq + PROOF_TOKENS * request.open for request in adopted}

    def arrived(self, request: RunningRequest) -> None:
        """Count the request's progress from the end of its log, which may have been repaired since the adoption."""
        if request.rid in self._goals:
            self._goals[request.rid] = request.accepted + PROOF_TOKENS * len(request.live)

    def may_run(self, rid: str) -> bool:
        """True if the request need not wait for the end of others' trial."""
        return not self.active or rid in self._on_trial

    def before(self, rids: set[str]) -> None:
        """Write down whose rows are in the step that comes, unless it is written already."""
        tried = {rid: goal for rid, goal in self._goals.items() if rid in rids}
        record = self._record.before_step(self._lease.epoch, tried, alone=len(rids) == 1)
        if record != self._record:
            self._record = record
            self._write(encode(record).decode())

    def emitted(self, running: Mapping[str, RunningRequest], reading: Collection[str]) -> list[str]:
        """Clear the requests that made progress or ended; returns those that must make room for the next trial. While
        its log is read, a request does neither."""
        if not self._goals:
            return []
        got_on = [
            rid
            for rid, goal in self._goals.items()
            if rid not in reading and (rid not in running or running[rid].accepted >= goal)
        ]
        for rid in got_on:
            del self._goals[rid]
        if got_on:
            self._record = self._record.without(got_on)
        if not self._goals:
            self._write("")
        return [rid for rid in got_on if self.active and rid in running]

    def due(self, running: Collection[str]) -> bool:
        """True if the next trial, or the end of all trials, has come."""
        return self.active and not any(rid in self._goals and rid in running for rid in self._on_trial)

    def next_trial(self, running: Collection[str]) -> list[str]:
        """The requests that run next, alone; an empty list if all may run again."""
        self._record = self._record.without([rid for rid in self._record.suspects if rid not in running])
        self._on_trial = self._record.trial
        self.active = bool(self._on_trial)
        log.info("isolation continues", on_trial=len(self._on_trial), active=self.active, action="isolate")
        return self._on_trial

    def _write(self, record: str) -> None:
        suspects = self._record.suspects if record else []
        cleared = self._marked.difference(suspects)
        self._run(requests.note_suspects(self._lease, record, suspects, sorted(cleared)))
        self._marked = set(suspects)

    def _bury(self, rid: str, end: Poison) -> None:
        cause = (
            "This request crashed the group of processes that ran it, also when it ran alone. It was given up so that "
            f"others can go on; the operator finds it in the dead letters. The crash: {end.kind}: {end.message}"
        )
        log.error("request made a dead letter", rid=rid, kind=end.kind, error=end.message, action="bury")
        self._run(requests.bury(self._lease, rid, cause))
