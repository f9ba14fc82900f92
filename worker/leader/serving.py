"""The step loop of one epoch of a group: schedule → execute → sample → update; `RequestLoop` claims and emits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import structlog

from control.errors import GroupError, Poisoned, collective_failure
from control.messages import Assignment, ModelAssets, Sampling
from control.placement import farm
from control.placement.need import KVCost
from control.records import catalog
from control.redis.connection import Call
from control.replicas.lease import Lease
from worker.engine.images import EngineImages
from worker.engine.step import Forward, Step
from worker.leader.exchange import Exchange
from worker.leader.group import Group
from worker.leader.request import score_targets
from worker.leader.request_loop import PEER_FAILED, STEP_FAILED, RequestLoop, StopSignals
from worker.leader.scheduled_requests import ScheduledRequests
from worker.rank.heartbeat import Progress
from worker.sampling.sampler import StepSampler, StepTokens
from worker.sampling.vectors import VectorSampler
from worker.scheduling.scheduler import StepPlan
from worker.scheduling.sequence import Sequence

log = structlog.get_logger()


# The KV memory that a replica may have, as its host's assignment says: less, once others need it.


class KvShare:
    """Over all epochs of a leader process. The share of a replica only falls while it lives."""

    def __init__(self, host_id: str, model: str, replica: str) -> None:
        self.reading = farm.assignment_of(host_id, model, replica)
        """Reads what `take` takes; the heartbeat does so with each beat."""
        self.assets: ModelAssets | None = None
        """As they were published."""
        self._model = model
        self._tokens: int | None = None

    def take(self, assignment: Assignment | None) -> None:
        """Note what the assignment says; for any thread."""
        tokens = None if assignment is None else assignment.kv_limit
        if tokens is not None:
            self._tokens = self.within(tokens)

    def within(self, tokens: int) -> int:
        """So many tokens, or the share where that is less."""
        return tokens if self._tokens is None else min(tokens, self._tokens)

    def publication(self, tokens: int, cost: KVCost) -> list[Call[bool]]:
        """Tells API processes that sequences may have so many tokens."""
        if self.assets is None or self.assets.kv_tokens == tokens:
            return []
        self.assets = self.assets.with_kv(tokens, cost.longest(tokens, self.assets.context_length))
        return [catalog.put_assets(self._model, self.assets)]


OVERLAP_BELOW_S = 0.05
"""Steps below this length overlap with the exchange with Redis. A longer step can afford to wait for Redis, and must:
a cancel takes effect one step later where the answer comes during one."""
LONG_PROMPTS = 64
"""A step with so many waiting prompt tokens is not a short one."""
REPEAT_WITHIN_S = 0.02
"""For the forwards of one command together, so that what arrives or is cancelled meanwhile is soon heard of."""
PREFILL_S = 1.0
MIXED_S = 0.03
LEAST_TOKENS = 64
"""Smallest chunk beside decoding rows, and the first chunk before a rate is known."""
SLOW_TOKENS = 16
"""The shortest chunk of a step of prompts alone, on a machine that computes fewer in PREFILL_S."""


def met_in_collective(error: GroupError) -> bool:
    """True if the leader's own part failed because of another rank: that says nothing about the step's requests."""
    return collective_failure(error.leader) is not None


def _recent() -> deque[float]:
    return deque(maxlen=7)


@dataclass(slots=True)
class ChunkSize:
    """The number of prompt tokens in one step. Learns from the steps of one process, over all its epochs.

    Long chunks are computed at the best rate, but streams, cancels and claims wait for their end. So the size follows
    the measured rate: a step of prompts alone takes PREFILL_S, one with decode rows MIXED_S. Chunks beside decode rows
    have at least `least`, from which on the rate is nearly the best.
    """

    least: int = LEAST_TOKENS
    _mixed_s: deque[float] = field(default_factory=_recent)
    """Seconds per prompt token of steps with at least `least` of them."""
    _prefill_s: deque[float] = field(default_factory=_recent)
    """The same of steps without a row that decodes, from SLOW_TOKENS on."""

    def observe(self, seconds: float, prompt_tokens: int, decode_rows: int = 0) -> None:
        """Record a finished step. Where it fed few prompt tokens, its time says nothing about them."""
        if prompt_tokens >= self.least:
            self._mixed_s.append(seconds / prompt_tokens)
        if prompt_tokens >= SLOW_TOKENS and not decode_rows:
            self._prefill_s.append(seconds / prompt_tokens)

    @property
    def mixed(self) -> int:
        """The most prompt tokens of a step that others decode in."""
        if not self._mixed_s:
            return min(self.least, self.prefill)
        return max(min(self.least, self.prefill), int(MIXED_S / median(self._mixed_s)))

    @property
    def prefill(self) -> int:
        """The most prompt tokens of a step that nobody decodes in."""
        if not self._prefill_s:
            return self.least
        return max(SLOW_TOKENS, int(PREFILL_S / median(self._prefill_s)))


class RepeatTime:
    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._began = time.monotonic()
        self._last = self._began

    def allows_another(self) -> bool:
        """True if a forward that takes as long as the one that has just ended would end in time."""
        now = time.monotonic()
        seconds = now - self._last
        self._last = now
        return now + seconds - self._began <= self._within_s


@dataclass(frozen=True)
class ServingContext:
    """The objects that the step loop of one epoch needs."""

    lease: Lease
    group: Group
    running: ScheduledRequests
    exchange: Exchange
    progress: Progress
    check: Callable[[], None]
    """Raises EpochOver when the epoch is over."""
    sampler: StepSampler | VectorSampler = field(default_factory=StepSampler)
    chunk_size: ChunkSize = field(default_factory=ChunkSize)
    """It knows the rate of earlier epochs."""
    images: EngineImages | None = None
    """Those of the leader's own rank; None where the model takes text only."""
    signals: StopSignals = field(default_factory=StopSignals)
    share: KvShare | None = None
    """None where the replica's KV memory stays as it is."""


class Serving(RequestLoop):
    """The step loop of a formed group."""

    def __init__(self, context: ServingContext) -> None:
        super().__init__(context.running, context.exchange, context.progress, context.check, context.signals)
        self._running: ScheduledRequests = context.running
        self._group = context.group
        self._sampler = context.sampler
        self._chunk_size = context.chunk_size
        self._images = context.images
        self._scheduler = context.running.scheduler
        self._share = context.share
        self._lowered_in = 0
        """The count of steps when the limit of KV memory was lowered last."""
        self.overlap_below_s = OVERLAP_BELOW_S
        self.repeat_within_s = REPEAT_WITHIN_S

    def turn(self) -> None:
        self._check()
        self._keep_to_share()
        super().turn()

    def _keep_to_share(self) -> None:
        """Lower the limit of KV memory where the replica's share has fallen. The limit is told once the ranks have
        forgotten all that is above it: an idle group runs a step for that."""
        scheduler = self._scheduler
        share = self._share
        limit = scheduler.kv_limit
        if share is not None and share.within(limit) < limit:
            scheduler.lower_kv_limit(share.within(limit))
            if scheduler.kv_limit < limit:
                self._lowered_in = scheduler.steps
        if self._progress.kv_limit == scheduler.kv_limit:
            return
        is_told = scheduler.ranks_know_all or scheduler.steps > self._lowered_in
        if not is_told and not scheduler.has_work and not self._isolation.active:
            self._prove()
            is_told = True
        if is_told:
            self._progress.kv_limit = scheduler.kv_limit
            published = [] if share is None else share.publication(scheduler.kv_limit, scheduler.kv_cost)
            for call in published:
                self._exchange.publish(call)
                log.info("gave KV memory back", kv_tokens=scheduler.kv_limit, action="kv_give_back")

    # --- a step -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One command. The tokens of the step before are emitted while it runs, and new requests are claimed with
        them."""
        plan = first = self._schedule()
        encodes = self._hand_over_pixels(plan)
        repeat = self._repeats
        lasts = RepeatTime(self.repeat_within_s)
        with self._execute(plan, repeat) as step:
            # The command is on its way: Redis gets the last step's tokens while this one runs.
            self.emit(self._group.last_seconds)
            more = True
            while more:
                forward = step.forward(score_targets(plan))
                tokens = self._sample(plan, forward, step)
                self._running.update(plan, tokens, forward.scores)
                more = step.agree(tokens.ids, more=repeat and self._continues_decode(lasts))
                if more:
                    plan = self._running.schedule()
        self._running.unsent = True
        if not encodes:  # its time would say nothing of the rate of prompts
            self._chunk_size.observe(self._group.last_seconds, first.prompt_tokens, len(first.continuing))
        answer = self._exchange.finish()
        if answer is not None:
            self._settle(answer)
        if not self._overlaps:
            self.deliver()

    def _schedule(self) -> StepPlan:
        """The plan of a command's first forward. The requests to blame for a crash are written down before it runs."""
        self._scheduler.prefill_budget = self._chunk_size.prefill
        self._scheduler.mixed_budget = self._chunk_size.mixed
        plan = self._running.schedule()
        if self._isolation.watching:
            self._isolation.before(self._running.rids_of(plan))
        return plan

    def _hand_over_pixels(self, plan: StepPlan) -> bool:
        """Read the images that the step encodes, before its command is sent: no rank then waits for Redis. The pixels
        are kept for one step only. True if there are any."""
        if self._images is None:
            return False
        images = [needed for needed in plan.needed_images() if not self._images.has(needed.image.digest)]
        self._images.pixels = self._exchange.read_pixels(images)
        return bool(images)

    @contextmanager
    def _execute(self, plan: StepPlan, repeat: bool) -> Generator[Step]:
        """Every rank runs the plan; the context is the leader's part. Raises Poisoned where the step fails."""
        try:
            with self._group.step(plan.change, repeat, plan.images) as step:
                yield step
        except GroupError as error:
            rids = {sid: sequence.rid for sid, sequence in plan.sequences.items()}
            log.error("the step failed", seq=self._group.seq, requests=rids, action="poison")
            raise Poisoned(PEER_FAILED if met_in_collective(error) else STEP_FAILED, str(error), 0) from error

    def _sample(self, plan: StepPlan, forward: Forward, step: Step) -> StepTokens:
        """The tokens of a forward. Where they are on the device, the next decode step is launched before they are
        here."""
        pending = self._sampler.begin(plan.to_sample, forward)
        step.run_ahead(pending.on_device)
        return pending.wait()

    @property
    def _repeats(self) -> bool:
        """True if a command may have several forwards. A leader alone sends no commands: its next one is free."""
        return not (self._group.alone or self._isolation.watching or self._isolation.active)

    def _continues_decode(self, lasts: RepeatTime) -> bool:
        """True if the same sequences decode once more: none ends, fails, waits or begins, and there is time for it."""
        return lasts.allows_another() and not self._running.urgent and self._scheduler.steady

    @property
    def _overlaps(self) -> bool:
        """True if Redis gets the last step's tokens while the next one runs. During a crash isolation each step must be
        settled before the next one, which may crash."""
        quick = self._group.last_seconds < self.overlap_below_s and self._scheduler.backlog < LONG_PROMPTS
        return quick and self._scheduler.has_work and not self._isolation.watching

    def _prove(self) -> None:
        """Run a step of one token that belongs to no request: a group that can't even do this blames none."""
        sampling = Sampling(max_tokens=1, temperature=0.0, seed="0")
        sid = self._scheduler.add(Sequence(rid="", choice=0, prompt=[0], sampling=sampling))
        plan = self._scheduler.schedule()
        with self._execute(plan, repeat=False) as step:
            tokens = self._sampler.begin(plan.to_sample, step.forward()).wait()
            step.agree(tokens.ids)
        self._scheduler.update(plan, {sid: tokens.ids[0]})
        self._scheduler.drop(sid)

    def _ping(self) -> None:
        self._scheduler.check_integrity()
        self._group.ping()
