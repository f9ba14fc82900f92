"""One epoch's work: claim → plan → step → emit, until the epoch ends or the leader is told to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from control import requests
from control.clients import SyncRedis
from control.commands import wait_for_work
from control.connection import Call, run, run_every
from control.errors import CollectiveFailed, GroupError, Lost, Poisoned, RedisUnavailable, RequestTooLarge
from control.lease import Lease
from control.messages import RequestState, Sampling
from control.outage import outage
from control.requests import Claims, EmitResult
from worker.group import Group
from worker.isolation import Isolation
from worker.progress import Progress
from worker.running import RunningRequest
from worker.sampling import StepSampler
from worker.scheduling.finish import Finisher
from worker.scheduling.scheduler import Scheduler, StepPlan
from worker.scheduling.sequence import Sequence
from worker.siblings import Siblings

log = structlog.get_logger()

STEP_FAILED = "step_failed"
"""The kind of poison that a failed step leaves."""
PEER_FAILED = "peer_failed"
"""The kind that it leaves where the leader met no more than another rank's failure, in a collective."""
IDLE_BLOCK_MS = 500
AHEAD_STEPS = 2
"""Prompts are claimed for this many steps ahead; the rest stays in the queue."""
IDLE_PING_S = 5.0
LOOP = "leader"
"""Its name where loops say that they wait for Redis."""
AWAY_S = 0.2
"""Between tries while Redis is away and a finished step is held."""

T = TypeVar("T")


def met_in_collective(error: GroupError) -> bool:
    """Whether the leader's own part failed because of another rank: that says nothing about the step's requests."""
    cause: BaseException | None = error.leader
    while cause is not None and not isinstance(cause, CollectiveFailed):
        cause = cause.__cause__
    return cause is not None


class Serving:
    """The step loop of a formed group. `run` returns when stopped, and raises EpochOver when the epoch ends."""

    def __init__(
        self,
        client: SyncRedis,
        blocking: SyncRedis,
        lease: Lease,
        group: Group,
        scheduler: Scheduler,
        finisher: Finisher,
        progress: Progress,
        check: Callable[[], None],
        siblings: Siblings,
    ) -> None:
        self._client, self._blocking, self._lease, self._group = client, blocking, lease, group
        self._scheduler, self._finisher, self._progress, self._check = scheduler, finisher, progress, check
        self._siblings = siblings
        self._running: dict[str, RunningRequest] = {}
        self._isolation = Isolation(lease, self._held)
        self._sampler = StepSampler()
        self._bell = "0"
        self.steps = 0
        """Steps completed: acknowledged by every rank and emitted."""

    # --- the loop ---------------------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Take up what the replica's earlier epochs left; once, before the first `run`.

        Who leaves something behind may have crashed: the group first proves itself with a step that is nobody's, and
        what happens before all have got on is held against those in whose step it happens.
        """
        claims = self._held(requests.claim(self._lease, 0, 0, adopt=True))
        if claims.requests:
            adopted = self._isolation.open(claims.requests)
            self._prove()
            self._take(Claims(adopted, claims.bell))
            self._isolation.watch(self._running.values())

    def run(self, stopping: Callable[[], bool]) -> None:
        """Serve until `stopping()`."""
        last_contact = time.monotonic()
        while not stopping():
            self._check()
            if self._isolation.due(self._running):
                self._convene()
            if not self._isolation.active:
                self._take_over()
            if self._scheduler.has_work:
                self._step()
                last_contact = time.monotonic()
            else:
                self._scheduler.check_integrity()
                self._idle()
                if time.monotonic() - last_contact > IDLE_PING_S:
                    self._group.ping()
                    self._progress.idle()
                    last_contact = time.monotonic()

    def _take_over(self) -> None:
        """Take up what replicas that are gone left behind, room or not: somebody waits for it."""
        for name in self._hold(self._siblings.gone):
            claims = self._held(requests.takeover(self._lease, name))
            if claims.requests:
                log.warning("takes over from a replica that is gone", gone=name, requests=len(claims.requests))
            self._take(claims)

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def trying(self) -> bool:
        """Whether the last step was a trial of requests that may have crashed the group."""
        return self._isolation.trying

    def give_back(self) -> None:
        """Put every running request back into its queue at once; another epoch continues it from its log."""
        for rid in list(self._running):
            run(self._client, requests.requeue(self._lease, rid))
            del self._running[rid]

    def _idle(self) -> None:
        """Claim, and if there was nothing wait for the bell, which also rings for cancels, drains and poison."""
        self._take(self._held(self._claim()))
        if not self._scheduler.has_work:
            try:
                wait_for_work(self._blocking, self._lease, self._bell, IDLE_BLOCK_MS)
            except RedisUnavailable:
                time.sleep(AWAY_S)

    def _claim(self) -> Call[Claims]:
        """Ask for what there is room for and prefill will soon come to."""
        scheduler = self._scheduler
        ahead = AHEAD_STEPS * scheduler.token_budget - scheduler.backlog
        room, tokens = scheduler.room() if not self._isolation.active else (0, 0)
        if not scheduler.has_work:
            tokens = requests.ANY_TOKENS  # a head that can never fit is then refused instead of blocking its queue
        return requests.claim(self._lease, room, tokens, adopt=False, ahead_tokens=max(0, ahead))

    def _step(self) -> None:
        plan = self._scheduler.plan()
        for sid in plan.sequences:
            self._running[self._scheduler.sequence(sid).rid].prefilling()
        if self._isolation.watching:
            self._isolation.before({self._scheduler.sequence(sid).rid for sid in plan.fed})
        rows = [self._scheduler.sequence(sid) for sid in plan.sampled]
        tokens = self._run_plan(plan, rows)
        self._scheduler.applied(plan, {sid: token for sid, token in tokens.items() if token >= 0})
        for sequence in rows:
            self._record(sequence, tokens[sequence.sid])
        self._exchange()

    def _run_plan(self, plan: StepPlan, rows: list[Sequence]) -> dict[int, int]:
        """The token of each sampled row by its sid; negative where a row failed."""
        try:
            result = self._group.step(lambda **at: plan.command(self._lease.model, **at), self._sampler.bind(rows))
        except GroupError as error:
            raise Poisoned(PEER_FAILED if met_in_collective(error) else STEP_FAILED, str(error), 0) from error
        return dict(zip(result.sids, result.tokens, strict=True))

    def _prove(self) -> None:
        """A step of one token that belongs to nobody: a group that can't even do this accuses no request."""
        sampling = Sampling(max_tokens=1, temperature=0.0, seed="0")
        canary = Sequence(rid="", choice=0, prompt=[0], sampling=sampling)
        sid = self._scheduler.add(canary)
        plan = self._scheduler.plan()
        self._scheduler.applied(plan, self._run_plan(plan, [canary]))
        self._scheduler.drop(sid)

    def _record(self, sequence: Sequence, token: int) -> None:
        """Take one sampled token: note it, and decide whether its choice ends with it."""
        request = self._running[sequence.rid]
        if token < 0:
            request.append(sequence.choice, None, "error", self._sampler.failures.pop(sequence.sid))
            self._scheduler.drop(sequence.sid)
            return
        end = self._finisher.decide(sequence, token)
        finish, cause = end if end is not None else (None, None)
        request.append(sequence.choice, token, finish, cause, self._sampler.logprobs.get(sequence.sid))
        if end is not None:
            self._scheduler.drop(sequence.sid)

    # --- Redis ------------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Emit what the step produced and claim what there is room for: one round trip."""
        calls: list[Call[EmitResult] | Call[Claims]] = [
            requests.emit(self._lease, [request.emission() for request in self._running.values()]),
            self._claim(),
        ]
        # A server that can't write answers each call with a refusal; both may be sent twice, so both are.
        emitted, claims = self._hold(lambda: run_every(self._client, calls))
        self.steps += 1
        self._settle(emitted)
        self._take(claims)

    def _settle(self, result: EmitResult) -> None:
        if result.behind:
            # The log and this process disagree: the log is the truth, so start over from it.
            raise Lost(f"the token log is elsewhere than this leader for {', '.join(result.behind)}")
        for rid in result.taken:
            self._forget(rid)
        for rid, request in list(self._running.items()):
            request.emitted()
            if not request.live:
                del self._running[rid]
        for rid in self._isolation.emitted(self._running):
            self._unseat(self._running[rid])
        for rid in result.cancelled:
            self._end(rid, "cancelled", "cancelled by the client")
        for rid in result.expired:
            self._end(rid, "expired", "the request's deadline passed")

    def _end(self, rid: str, state: RequestState, cause: str) -> None:
        """End a running request from outside its own tokens."""
        request = self._running.pop(rid, None)
        if request is None:
            return
        for sequence in request.live:
            self._scheduler.drop(sequence.sid)
        request.end("cancelled" if state == "cancelled" else "expired", cause)
        self._held(requests.emit(self._lease, [request.emission(state)]))

    def _forget(self, rid: str) -> None:
        """Another replica has taken the request."""
        request = self._running.pop(rid, None)
        for sequence in request.live if request else []:
            self._scheduler.drop(sequence.sid)

    def _take(self, claims: Claims) -> None:
        self._bell = claims.bell
        for claimed in claims.requests:
            if claimed.rid in self._running:  # claimed by the first copy of a call whose answer was lost
                continue
            request = self._running[claimed.rid] = RunningRequest.from_claim(claimed)
            if not self._isolation.active:
                self._seat(request)

    def _seat(self, request: RunningRequest) -> None:
        """Let a request run, from the start or from where it was."""
        try:
            for sequence in request.live:
                self._scheduler.add(sequence)
                self._finisher.adopt(sequence)
        except RequestTooLarge as error:
            for sequence in request.live:
                self._scheduler.drop(sequence.sid)
            request.end("error", str(error))
            self._held(requests.emit(self._lease, [request.emission()]))
            del self._running[request.rid]

    def _unseat(self, request: RunningRequest) -> None:
        """Hold a request while others are on trial; it goes on later from what it has produced."""
        for sequence in request.live:
            self._scheduler.drop(sequence.sid)
        request.restart()

    def _convene(self) -> None:
        """Let the next ones run alone that may have crashed the group, or everybody once nobody is suspected."""
        trial = self._isolation.next_trial(self._running)
        for rid in trial or list(self._running):
            if self._running[rid].held:
                self._seat(self._running[rid])

    def _held(self, call: Call[T]) -> T:
        return self._hold(lambda: run(self._client, call))

    def _hold(self, attempt: Callable[[], T]) -> T:
        """Run `attempt` until Redis answers: a finished step is held, never thrown away, and nothing is poisoned."""
        while True:
            try:
                answer = attempt()
                outage.goes_on(LOOP)
                return answer
            except RedisUnavailable as error:
                outage.waits(LOOP, error)
                self._check()
                time.sleep(AWAY_S)
