"""One epoch's part in finding a request that crashes its group: what is watched, who is on trial, who is held.

Without a crash before it nothing is watched, and a step costs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import structlog

from control import requests
from control.messages import encode
from control.redis.connection import Call
from control.replicas import health
from control.replicas.health import Poison
from control.replicas.lease import Lease
from control.requests import Claimed
from worker.leader.requests.running import RunningRequest
from worker.leader.requests.suspects import PROOF_TOKENS, Docket, decode_docket

log = structlog.get_logger()


class Isolation:
    """Judges the epoch before this one, and then says step by step who may run."""

    def __init__(self, lease: Lease, held: Callable[[Call[Any]], Any]) -> None:
        """`held` runs a call and waits while Redis is away."""
        self._lease, self._held = lease, held
        self._docket = Docket()
        self._marked: set[str] = set()
        self._goals: dict[str, int] = {}
        """Requests that were adopted and have not got on yet, with the seq by which they will have."""
        self._on_trial: list[str] = []
        self.active = False
        """Whether only those on trial may run, and nothing new is claimed."""

    @property
    def watching(self) -> bool:
        """Whether a crash now would accuse somebody, so that steps must be recorded."""
        return bool(self._goals)

    @property
    def trying(self) -> bool:
        """Whether a step of a trial was run in this epoch."""
        return self.active and self._docket.epoch == self._lease.epoch

    def open(self, adopted: list[Claimed]) -> list[Claimed]:
        """Judge how the dockets' epochs ended; bury whom they condemn. Returns `adopted` without those."""
        dockets: dict[str, str] = self._held(requests.read_dockets(self._lease))
        adopted = self._judge(dockets, adopted)
        if dockets and not adopted:
            self._write("")
        self.active = bool(self._docket.suspects)
        if self.active:
            log.warning("isolating a crash", suspects=len(self._docket.suspects), guilty=len(self._docket.guilty))
        return adopted

    def inherit(self, replica: str, taken: list[Claimed]) -> list[Claimed]:
        """Judge the docket of a replica that was given up, among whose requests `taken` are; as `open`."""
        dockets: dict[str, str] = self._held(requests.read_dockets(self._lease))
        dockets.pop(self._lease.replica, None)
        taken = self._judge(dockets, taken)
        self.active = bool(self._docket.suspects)
        self._on_trial = []
        if not taken and not self._goals:
            self._write("")
        log.warning("tries the suspects of a replica that was given up", replica=replica, active=self.active)
        return taken

    def _judge(self, dockets: dict[str, str], claimed: list[Claimed]) -> list[Claimed]:
        """Make each docket part of this one; `claimed` are those that may be in them. Returns them without the dead."""
        seqs = {one.rid: one.seq for one in claimed}
        for replica, text in sorted(dockets.items()):
            docket = decode_docket(text)
            self._marked |= {*docket.suspects, *docket.tried}
            poisons: list[Poison] = self._held(health.poison_history(self._lease.model, replica))
            end = next((poison for poison in poisons if poison.epoch == docket.epoch), None)
            judged, condemned = docket.judged(end.kind if end else None, seqs)
            self._docket = self._docket.joined(judged)
            if condemned is not None and end is not None:
                self._bury(condemned, end)
                del seqs[condemned]
        return [one for one in claimed if one.rid in seqs]

    def watch(self, adopted: Collection[Claimed]) -> None:
        """These were adopted, or taken over: a crash before they have got on makes them suspects."""
        self._goals |= {one.rid: one.seq + PROOF_TOKENS * one.open for one in adopted}

    def arrived(self, request: RunningRequest) -> None:
        """Its log is here, which may have been repaired since it was adopted: it gets on from there."""
        if request.rid in self._goals:
            self._goals[request.rid] = request.accepted + PROOF_TOKENS * len(request.live)

    def may_run(self, rid: str) -> bool:
        """Whether the request need not wait for the end of others' trial."""
        return not self.active or rid in self._on_trial

    def before(self, rids: set[str]) -> None:
        """Write down whose rows are in the step that comes, unless it is written already."""
        tried = {rid: goal for rid, goal in self._goals.items() if rid in rids}
        docket = self._docket.record(self._lease.epoch, tried, alone=len(rids) == 1)
        if docket != self._docket:
            self._docket = docket
            self._write(encode(docket).decode())

    def emitted(self, running: dict[str, RunningRequest], reading: Collection[str]) -> list[str]:
        """Acquit who has got on or ended; returns those who must make room for the others' trial. Those whose log is
        still being read have done neither."""
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
            self._docket = self._docket.without(got_on)
        if not self._goals:
            self._write("")
        return [rid for rid in got_on if self.active and rid in running]

    def due(self, running: Collection[str]) -> bool:
        """Whether the next trial, or the end of all trials, has come."""
        return self.active and not any(rid in self._goals and rid in running for rid in self._on_trial)

    def next_trial(self, running: Collection[str]) -> list[str]:
        """Who runs next with nobody else; an empty list where all may run again."""
        self._docket = self._docket.without([rid for rid in self._docket.suspects if rid not in running])
        self._on_trial = self._docket.trial
        self.active = bool(self._on_trial)
        log.info("the next trial" if self.active else "nobody is suspected any more", requests=len(self._on_trial))
        return self._on_trial

    def _write(self, docket: str) -> None:
        suspects = self._docket.suspects if docket else []
        cleared = self._marked.difference(suspects)
        self._held(requests.note_suspects(self._lease, docket, suspects, sorted(cleared)))
        self._marked = set(suspects)

    def _bury(self, rid: str, end: Poison) -> None:
        cause = (
            "This request crashed the group of processes that ran it, also when it ran alone. It was given up so that "
            f"others can go on; the operator finds it in the dead letters. The crash: {end.kind}: {end.message}"
        )
        log.error("buried a request that crashed its group alone", rid=rid, kind=end.kind, error=end.message)
        self._held(requests.bury(self._lease, rid, cause))
