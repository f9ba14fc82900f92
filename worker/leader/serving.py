"""The step loop of one epoch: claim → plan → forward → sample → apply → emit."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import structlog

from control import requests
from control.errors import GroupError, Poisoned, collective_failure
from control.messages import Sampling
from control.replicas.lease import Lease
from worker.engine.images import EngineImages
from worker.engine.step import Step
from worker.health.progress import Progress
from worker.leader.chunk_size import ChunkSize
from worker.leader.dead_replicas import DeadReplicas
from worker.leader.requests.claimer import Claimer
from worker.leader.requests.emitter import Emitter
from worker.leader.requests.image_reader import ImageReader
from worker.leader.requests.prompt_scores import score_targets
from worker.leader.requests.redis_exchange import RedisExchange
from worker.leader.requests.request_manager import RequestManager
from worker.sampling.step_sampler import StepSampler
from worker.sampling.vectors import VectorSampler
from worker.scheduling.scheduler import Scheduler, StepPlan
from worker.scheduling.sequence import Sequence
from worker.tp_group.group import Group

log = structlog.get_logger()

STEP_FAILED = "step_failed"
"""Kind of poison after a failed step."""
PEER_FAILED = "peer_failed"
"""Kind of poison after another rank's failure, which the leader met in a collective."""
IDLE_BLOCK_MS = 500
IDLE_PING_S = 5.0
OVERLAP_BELOW_S = 0.04
"""Where steps are shorter, Redis is heard while the next one runs. A longer step can afford to wait for Redis, and
must: a cancel takes effect one step later where the answer comes during one."""
LONG_PROMPTS = 64
"""A step with so many waiting prompt tokens is not a short one."""
REPEAT_WITHIN_S = 0.02
"""For the forwards of one command together, so that what arrives or is cancelled meanwhile is soon heard of."""


def met_in_collective(error: GroupError) -> bool:
    """True if the leader's own part failed because of another rank: that says nothing about the step's requests."""
    return collective_failure(error.leader) is not None


class RepeatTime:
    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._began = self._last = time.monotonic()

    def allows_another(self) -> bool:
        """True if a forward that takes as long as the one that has just ended would end in time."""
        now = time.monotonic()
        took, self._last = now - self._last, now
        return now + took - self._began <= self._within_s


class Serving:
    """The step loop of a formed group. `run` returns when stopped, and raises EpochOver when the epoch ends."""

    def __init__(
        self,
        lease: Lease,
        group: Group,
        scheduler: Scheduler,
        manager: RequestManager,
        exchange: RedisExchange,
        progress: Progress,
        check: Callable[[], None],
        dead_replicas: DeadReplicas,
        chunk_size: ChunkSize | None = None,
        sampler: StepSampler | VectorSampler | None = None,
        images: EngineImages | None = None,
    ) -> None:
        """`chunk_size` knows the rate of earlier epochs; `images` are the leader's own rank's."""
        self._lease, self._group, self._scheduler, self._manager = lease, group, scheduler, manager
        self._exchange, self._progress, self._check, self._dead_replicas = exchange, progress, check, dead_replicas
        self._sampler, self._chunk_size = sampler or StepSampler(), chunk_size or ChunkSize()
        self._images = ImageReader(lease.model, exchange, scheduler, manager, images)
        self.claimer = Claimer(lease, exchange, scheduler, manager)
        self.emitter = Emitter(exchange, manager, self.claimer)
        self.overlap_below_s, self.repeat_within_s = OVERLAP_BELOW_S, REPEAT_WITHIN_S

    @property
    def busy(self) -> bool:
        return bool(self._manager.running or self.claimer.reading)

    @property
    def trying(self) -> bool:
        """True if the last step was a trial of requests that may have crashed the group."""
        return self._manager.isolation.trying

    def adopt(self) -> None:
        """Adopt the requests of the replica's earlier epochs; once, before the first `run`. The last epoch may have
        crashed, so the group first runs a step without a request, and later crashes count for the requests in them."""
        adopted = self.claimer.adopt()
        if adopted:
            adopted = self._manager.isolation.open(adopted)
            self._prove()
            self._manager.isolation.watch(adopted)
            self.claimer.read(adopted)

    def run(self, stopping: Callable[[], bool]) -> None:
        last_contact = time.monotonic()
        while not stopping():
            self._check()
            self._resume()
            if not (self._manager.isolation.active or self.claimer.draining):
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
        self.emitter.deliver()

    # --- a step -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._scheduler.prefill_budget, self._scheduler.mixed_budget = self._chunk_size.prefill, self._chunk_size.mixed
        first = plan = self._scheduler.plan()
        self._manager.before(plan)
        encodes = self._images.fetch(plan)
        repeat, lasts = self._repeats, RepeatTime(self.repeat_within_s)
        with self._running(plan, repeat) as step:
            self.emitter.begin()  # the command is on its way: Redis gets the last step's tokens while this one runs
            more = True
            while more:
                forward = step.forward(score_targets(plan))
                pending = self._sampler.begin(plan.to_sample, forward)
                step.run_ahead(pending.on_device)
                tokens = pending.wait()
                self._manager.apply(plan, tokens, forward.scores)
                more = step.agree(tokens.ids, more=repeat and self._continues_decode(lasts))
                if more:
                    plan = self._scheduler.plan()
        if not encodes:  # its time would say nothing of the rate of prompts
            self._chunk_size.observe(self._group.last_seconds, first.prompt_tokens, len(first.continuing))
        self.emitter.finish()
        if not self._overlaps:
            self.emitter.deliver()

    @property
    def _repeats(self) -> bool:
        """True if a command may have several forwards. A leader alone sends no commands: its next one is free."""
        isolation = self._manager.isolation
        return not (self._group.alone or isolation.watching or isolation.active)

    def _continues_decode(self, lasts: RepeatTime) -> bool:
        """True if the same sequences decode once more: none ends, fails, waits or begins, and there is time for it."""
        return lasts.allows_another() and not self._manager.urgent and self._scheduler.steady

    @property
    def _overlaps(self) -> bool:
        """True if Redis gets the last step's tokens while the next one runs. During a crash isolation each step must be
        settled before the next one, which may crash."""
        quick = self._group.last_seconds < self.overlap_below_s and self._scheduler.backlog < LONG_PROMPTS
        return quick and self._scheduler.has_work and not self._manager.isolation.watching

    @contextmanager
    def _running(self, plan: StepPlan, repeat: bool) -> Generator[Step]:
        """Every rank runs the plan; the context is the leader's part. Raises Poisoned where the step fails."""
        try:
            with self._group.step(plan.change, repeat, plan.images) as step:
                yield step
        except GroupError as error:
            rids = {sid: sequence.rid for sid, sequence in plan.sequences.items()}
            log.error("the step failed", seq=self._group.seq, requests=rids, action="poison")
            raise Poisoned(PEER_FAILED if met_in_collective(error) else STEP_FAILED, str(error), 0) from error

    def _prove(self) -> None:
        """Run a step of one token that belongs to no request: a group that can't even do this blames none."""
        sampling = Sampling(max_tokens=1, temperature=0.0, seed="0")
        sid = self._scheduler.add(Sequence(rid="", choice=0, prompt=[0], sampling=sampling))
        plan = self._scheduler.plan()
        with self._running(plan, repeat=False) as step:
            tokens = self._sampler.begin(plan.to_sample, step.forward()).wait()
            step.agree(tokens.ids)
        self._scheduler.applied(plan, {sid: tokens.ids[0]})
        self._scheduler.drop(sid)

    # --- between steps ----------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Let those run that have been read, or have waited."""
        self.claimer.arrive()
        self._manager.resume(self.claimer.reading.rids)

    def _take_over(self) -> None:
        """Take up what replicas that are gone left behind, room or not: clients wait for it."""
        manager = self._manager
        for name in self._exchange.hold(self._dead_replicas.gone):
            how = self._exchange.held(requests.inherit(self._lease, name))
            taken = self.claimer.take_over(name)
            if taken:
                log.warning("took over requests", gone=name, requests=len(taken), suspects=how, action="take_over")
            if how == "waits":
                self._dead_replicas.look_again(name)
            if how == "inherited":
                self.emitter.deliver()
                taken = manager.isolation.inherit(name, taken)
                manager.hold_all()
            manager.isolation.watch(taken)
            self.claimer.read(taken)
            self._resume()

    def _idle(self) -> None:
        """Claim, and if there was nothing wait for the bell, which also rings for cancels, drains and poison."""
        self._manager.note_load()
        self.claimer.reconcile()
        claims = self.claimer.claim_now()
        if self._scheduler.has_work or claims.more:
            return
        if self.claimer.reading:
            self.claimer.reading.wait(IDLE_BLOCK_MS / 1000)
        elif not self._manager.wait_for_grammar(IDLE_BLOCK_MS / 1000):
            self._exchange.wait_for_work(self.claimer.bell, IDLE_BLOCK_MS)
