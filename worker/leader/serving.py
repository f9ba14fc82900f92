"""One epoch's work: claim → plan → step → emit, until the epoch ends or the leader is told to stop."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from control import requests
from control.errors import GroupError, Poisoned, collective_failure
from control.messages import Sampling
from control.replicas.lease import Lease
from control.requests import Claims, EmitResult
from worker.engine.step import StepResult
from worker.health.progress import Progress
from worker.leader.exchange import Exchange
from worker.leader.pace import Pace
from worker.leader.roster import Roster
from worker.leader.siblings import Siblings
from worker.leader.turn import Turn
from worker.sampling.step_sampler import StepSampler
from worker.scheduling.scheduler import Scheduler, StepPlan
from worker.scheduling.sequence import Sequence
from worker.tp_group.group import Group

log = structlog.get_logger()

STEP_FAILED = "step_failed"
"""The kind of poison that a failed step leaves."""
PEER_FAILED = "peer_failed"
"""The kind that it leaves where the leader met no more than another rank's failure, in a collective."""
IDLE_BLOCK_MS = 500
IDLE_PING_S = 5.0
OVERLAP_BELOW_S = 0.04
"""Where steps are shorter, Redis is heard while the next one runs. A longer step can afford to wait for Redis, and
must: a cancel takes effect one step later where the answer comes during one."""
LONG_PROMPTS = 64
"""Where so many tokens of prompts wait to be fed, the next step is none of the short ones."""
GATHER_S = 0.008
"""Where steps are shorter, Redis gets the tokens of several together; first and last tokens don't wait for others."""


def met_in_collective(error: GroupError) -> bool:
    """Whether the leader's own part failed because of another rank: that says nothing about the step's requests."""
    return collective_failure(error.leader) is not None


class Serving:
    """The step loop of a formed group. `run` returns when stopped, and raises EpochOver when the epoch ends."""

    def __init__(
        self,
        lease: Lease,
        group: Group,
        scheduler: Scheduler,
        roster: Roster,
        exchange: Exchange,
        progress: Progress,
        check: Callable[[], None],
        siblings: Siblings,
        pace: Pace | None = None,
    ) -> None:
        """`pace` knows the rate of earlier epochs."""
        self._lease, self._group, self._scheduler, self._roster = lease, group, scheduler, roster
        self._exchange, self._progress, self._check, self._siblings = exchange, progress, check, siblings
        self._sampler, self._pace = StepSampler(), pace or Pace()
        self._owed = False
        """Whether tokens have not been offered to Redis yet."""
        self._offered_at = 0.0
        self.overlap_below_s, self.gather_s = OVERLAP_BELOW_S, GATHER_S
        self.steps = 0
        """Exchanges completed: of steps that every rank has acknowledged, and whose tokens Redis has."""

    @property
    def trying(self) -> bool:
        """Whether the last step was a trial of requests that may have crashed the group."""
        return self._roster.isolation.trying

    def adopt(self) -> None:
        """Take up what the replica's earlier epochs left; once, before the first `run`.

        Who leaves something behind may have crashed: the group first proves itself with a step that is nobody's, and
        what happens before all have got on is held against those in whose step it happens.
        """
        adopted = self._roster.adopt()
        if adopted:
            adopted = self._roster.isolation.open(adopted)
            self._prove()
            self._roster.isolation.watch(adopted)
            self._roster.let_in(adopted)

    def run(self, stopping: Callable[[], bool]) -> None:
        """Serve until `stopping()`."""
        last_contact = time.monotonic()
        while not stopping():
            self._check()
            self._roster.convene()
            if not (self._roster.isolation.active or self._roster.draining):
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
        self._deliver()

    def give_back(self) -> None:
        """Put every running request back into its queue at once; another epoch continues it from its log."""
        self._roster.give_back()

    def _take_over(self) -> None:
        """Take up what replicas that are gone left behind, room or not: somebody waits for it."""
        for name in self._exchange.hold(self._siblings.gone):
            how = self._exchange.held(requests.inherit(self._lease, name))
            taken = self._roster.take_over(name)
            if taken:
                log.warning("takes over from a replica that is gone", gone=name, requests=len(taken), suspects=how)
            if how == "waits":
                self._siblings.look_again(name)
            if how == "inherited":
                self._deliver()
                taken = self._roster.isolation.inherit(name, taken)
                self._roster.hold_all()
            self._roster.isolation.watch(taken)
            self._roster.let_in(taken)
            self._roster.convene()

    def _idle(self) -> None:
        """Claim, and if there was nothing wait for the bell, which also rings for cancels, drains and poison."""
        self._roster.recount()
        claims = self._exchange.held(self._roster.claim())
        self._roster.take(claims)
        if self._scheduler.has_work or claims.more:
            return
        if self._roster.reading:
            self._roster.reading.wait(IDLE_BLOCK_MS / 1000)
        elif not self._roster.wait_for_grammar(IDLE_BLOCK_MS / 1000):
            self._exchange.wait_for_work(self._roster.bell, IDLE_BLOCK_MS)

    # --- a step -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._scheduler.alone, self._scheduler.beside = self._pace.alone, self._pace.beside
        plan = self._scheduler.plan()
        self._roster.prefilling(plan.sequences)
        isolation = self._roster.isolation
        if isolation.watching:
            isolation.before(set(self._roster.rids(plan.fed).values()))
        turn = Turn(self._scheduler, self._roster, self._sampler, plan)
        # A leader alone has nobody to send commands to: its next one costs it nothing.
        repeat = not (self._group.alone or isolation.watching or isolation.active)
        turn.book(self._run_plan(plan, turn, repeat).tokens)
        self._pace.observe(self._group.last_seconds, sum(map(len, plan.tokens)), len(plan.continuing))
        self._owed = True
        self._heard(self._exchange.finish())
        if not self._overlaps:
            self._deliver()

    @property
    def _overlaps(self) -> bool:
        """Whether Redis gets the last step's tokens while the next one runs, and not before.

        While a crash is looked into each step must be known to have got through before the next one may crash.
        """
        quick = self._group.last_seconds < self.overlap_below_s and self._scheduler.backlog < LONG_PROMPTS
        return quick and self._scheduler.has_work and not self._roster.isolation.watching

    def _offer(self) -> None:
        """Let the exchange begin. The next step's command is on its way by now: it must not wait behind this."""
        now = time.monotonic()
        if self._owed and (self._roster.urgent or now - self._offered_at >= self.gather_s):
            self._owed, self._offered_at = False, now
            self._exchange.start(self._roster.offer(), self._roster.claim_along())

    def _deliver(self) -> None:
        """Offer the tokens that are owed and wait for the answer, until none are."""
        while self._owed:
            self._owed, self._offered_at = False, time.monotonic()
            self._heard(self._exchange.deliver(self._roster.offer(), self._roster.claim_along()))

    def _heard(self, answer: tuple[EmitResult, Claims | None] | None) -> None:
        if answer is not None:
            emitted, claims = answer
            self.steps += 1
            self._roster.settle(emitted)
            if claims is None and self._roster.waiting:
                claims = self._exchange.held(self._roster.claim())
            if claims is not None:
                self._roster.take(claims)
            self._roster.recount()
            self._owed |= self._roster.owes

    def _run_plan(self, plan: StepPlan, turn: Turn, repeat: bool) -> StepResult:
        """Run the plan, and with `repeat` what follows it at once."""
        try:
            return self._group.step(
                lambda **at: plan.command(self._lease.model, repeat=repeat, **at),
                turn.sample,
                self._offer,
                turn.goes_on if repeat else None,
                turn.score,
            )
        except GroupError as error:
            # Ranks know sequences and log the command's seq: this line says whose they were.
            log.error("the step failed", seq=self._group.seq, requests=self._roster.rids(plan.fed))
            raise Poisoned(PEER_FAILED if met_in_collective(error) else STEP_FAILED, str(error), 0) from error

    def _prove(self) -> None:
        """A step of one token that belongs to nobody: a group that can't even do this accuses no request."""
        sampling = Sampling(max_tokens=1, temperature=0.0, seed="0")
        canary = Sequence(rid="", choice=0, prompt=[0], sampling=sampling)
        sid = self._scheduler.add(canary)
        plan = self._scheduler.plan()
        result = self._run_plan(plan, Turn(self._scheduler, self._roster, self._sampler, plan), repeat=False)
        self._scheduler.applied(plan, dict(zip(result.sids, result.tokens, strict=True)))
        self._scheduler.drop(sid)
