"""The group as its leader sees it: its formation, its steps, and the fan-out of every command.

A command goes to all ranks before the leader does its own part. Meanwhile a thread confirms its arrival and reads
exactly one reply per rank, whatever the leader's own outcome. This order allows no deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from control.clock import now_ms
from control.commands import (
    AnyCommand,
    AnyReply,
    BatchChange,
    Command,
    ErrorReply,
    GenerateStep,
    GenerateStepOk,
    GenerateStepWithImages,
    Init,
    LoadDenseShard,
    LoadDenseShardOk,
    NcclSanityCheck,
    NcclSanityResult,
    Ping,
    Pong,
    Reply,
    ShutdownRank,
    StepImage,
)
from control.errors import CollectiveLeft, EpochOver, GroupError, Poisoned, RankError, collective_failure
from control.redis.clients import SyncRedis
from control.replicas import commands
from control.replicas.health import Formation
from control.replicas.lease import Lease
from worker.detectors import LOAD_STALL_S
from worker.engine.step import Step
from worker.leader.exchange import BackgroundCall
from worker.rank.address import check_reachable
from worker.rank.heartbeat import Deadlines, Progress
from worker.rank.rank_worker import RankWorker

log = structlog.get_logger()

FORM_DEADLINE_S = 180.0
"""Time for every rank to appear: a rank process may have to start and to import its libraries."""
PING_DEADLINE_S = 10.0
DRAIN_S = 1.0

T = TypeVar("T", bound=Reply)


def generate_step(
    head: dict[str, int], model_id: str, change: BatchChange, repeat: bool = False, images: Sequence[StepImage] = ()
) -> GenerateStep:
    """The command of a step; `head` has its epoch and seq, `images` are those of the sequences that begin."""
    if not images:
        return GenerateStep(**head, model_id=model_id, change=change, repeat=repeat)
    return GenerateStepWithImages(
        **head,
        model_id=model_id,
        change=change,
        repeat=repeat,
        images=list(images),
        chunk_size=max(len(row.tokens) for row in change.rows),
    )


@dataclass(slots=True)
class _Answers:
    own: Reply | None = None
    """The leader's own reply."""
    ranks: list[AnyReply] = field(default_factory=list[AnyReply])

    @property
    def every(self) -> list[Reply]:
        """In rank order."""
        assert self.own is not None
        return [self.own, *self.ranks]


class Group:
    """The ranks of one epoch, whose end is that of its context. Every method raises EpochOver when the epoch ends while
    it waits."""

    def __init__(
        self,
        client: SyncRedis,
        blocking: SyncRedis,
        lease: Lease,
        rank_worker: RankWorker,
        progress: Progress,
        check: Callable[[], None],
        address: str,
    ) -> None:
        self._client = client
        self._lease = lease
        self._rank_worker = rank_worker
        self._progress = progress
        self._check = check
        self._address = address
        self._replies = commands.Replies(blocking, lease, rank_worker.world_size)
        self._background: BackgroundCall[list[AnyReply]] = BackgroundCall("replies")
        self._deadlines = Deadlines()
        self._seq = 0
        self.verifies_guesses = False
        """True if rows may have guesses, on every rank."""
        self.loaded: list[LoadDenseShardOk] = []
        """The ranks' replies to the load, in their order; empty before."""
        self.last_seconds = 0.0
        """Duration of the last command, from its sending to its last reply."""

    @property
    def seq(self) -> int:
        return self._seq

    @property
    def alone(self) -> bool:
        """True if the leader is its only rank."""
        return self._rank_worker.world_size == 1

    @property
    def stale_replies(self) -> int:
        """Replies of another epoch or seq that were dropped."""
        return self._replies.stale

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self._background.close()

    # --- forming ----------------------------------------------------------------------------------------------------

    def form(self, load: Callable[..., LoadDenseShard]) -> tuple[int, Formation]:
        """Form the group of this epoch; returns the tokens of KV memory on the rank with the least, and the time of
        each stage.

        `load` builds the load command from keyword arguments epoch and seq. Raises GroupError naming every side that
        failed, and SettingsError if ranks on other machines can't reach this one.
        """
        led = gathered = joined = now_ms()
        self._progress.phase = "forming"
        if self._rank_worker.world_size > 1:
            check_reachable(self._address, self.ping(FORM_DEADLINE_S))
            gathered = now_ms()
            self._rendezvous()
            self._prove()
            joined = now_ms()
        self._progress.phase = "loading"
        command = load(epoch=self._lease.epoch, seq=self._next())
        loaded = self._together("load", command, LOAD_STALL_S)
        self._progress.phase = "ready"
        self.loaded = replies = self._all(LoadDenseShardOk, loaded)
        for rank, reply in enumerate(replies):
            if reply.shares != command.shares:
                why = f"it has the shares {reply.shares} of the model, not {command.shares}: upgrade its host"
                raise GroupError("load", None, [RankError(rank, "load_failed", why)])
        self.verifies_guesses = all(reply.verifies_guesses for reply in replies)
        kv_tokens = min(reply.kv_tokens for reply in replies)
        return kv_tokens, Formation(self._lease.epoch, led, gathered, joined, loaded=now_ms())

    def ping(self, deadline_s: float = PING_DEADLINE_S) -> list[Pong]:
        """One pong per rank, in rank order; a pong from a rank that is not the expected one names both."""
        command = Ping(epoch=self._lease.epoch, seq=self._next())
        pongs: list[Pong] = []
        for expected, reply in enumerate(self._together("ping", command, deadline_s)):
            if not isinstance(reply, Pong) or reply.rank != expected:
                raise GroupError("ping", None, [RankError(expected, "bad_request", f"expected its pong, got {reply}")])
            pongs.append(reply)
        return pongs

    def _rendezvous(self) -> None:
        """Let the ranks meet: each gets a command in turn, and the leader joins after the last one."""
        command = Init(epoch=self._lease.epoch, seq=self._next(), world_size=self._rank_worker.world_size)
        with self._command("init", command, FORM_DEADLINE_S):
            self._rank_worker.join(self._lease.epoch, self._address)

    def _prove(self) -> None:
        """Every rank all-reduces a 1 and must see the world size."""
        replies = self._together("sanity check", NcclSanityCheck(epoch=self._lease.epoch, seq=self._next()), 30.0)
        wrong = [
            RankError(reply.rank, "nccl_init_failed", f"saw a sum of {reply.observed_sum:g}, expected {len(replies)}")
            for reply in self._all(NcclSanityResult, replies)
            if reply.observed_sum != len(replies)
        ]
        if wrong:
            raise GroupError("sanity check", None, wrong)

    # --- running ----------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, change: BatchChange, repeat: bool = False, images: Sequence[StepImage] = ()) -> Generator[Step]:
        """Fan a step out; `images` are those of the sequences that begin. The context is the leader's own part, and
        ends when every rank has acknowledged the step. Raises GroupError with both sides' errors, Poisoned if a rank
        did not answer in time."""
        head = {"epoch": self._lease.epoch, "seq": self._next()}
        command = generate_step(head, self._lease.model, change, repeat, images)
        prompt_tokens = sum(len(row.tokens) for row in change.rows if not row.guesses)
        # The head is computed for each position that is scored: it takes as long as many layers.
        scored = sum(row.scored[1] - row.scored[0] for row in change.rows if row.scored is not None)
        with self._command("step", command, self._deadlines.step(prompt_tokens + scored)) as answers:
            with self._rank_worker.step(command) as step:
                yield step
            answers.own = GenerateStepOk(**head, rank=0, checksum=step.checksum)
        desynced = [
            RankError(reply.rank, "forward_failed", f"its batch of step {command.seq} differs from the leader's")
            for reply in self._all(GenerateStepOk, answers.every)
            if reply.checksum != step.checksum
        ]
        if desynced:
            raise GroupError("step", None, desynced)
        self._deadlines.observe(self.last_seconds / max(1, step.forwards), prompt_tokens)

    def shutdown(self) -> None:
        """Ask every rank to end; best effort, one bad rank does not stop the sweep."""
        command = ShutdownRank(epoch=self._lease.epoch, seq=self._next())
        try:
            self._together("shutdown", command, 2.0)
        except Exception as error:
            log.warning("not every rank ended", error=str(error), action="rank_stop")

    # --- one command, all ranks -------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _together(self, command_name: str, command: AnyCommand, deadline_s: float) -> list[Reply]:
        """Have every rank execute `command`, the leader's own too; the replies in rank order."""
        with self._command(command_name, command, deadline_s) as answers:
            answers.own = self._rank_worker.answer(command)
        return answers.every

    @contextmanager
    def _command(self, command_name: str, command: Command, deadline_s: float) -> Generator[_Answers]:
        """Send `command` to every rank. The context is the leader's part, and ends with the last rank's reply. A reply,
        or progress of any rank, must come every `deadline_s`."""
        self._check()
        deadline = None if self.alone else commands.Deadline(deadline_s)
        if deadline is None:
            self._progress.begin(deadline_s)
        else:
            self._send(command, deadline)
            self._progress.begin(deadline_s, deadline.renew)
        own_error: Exception | None = None
        answers = _Answers()
        try:
            yield answers
        except Exception as error:  # accounted for below, together with the ranks' replies
            if isinstance(collective_failure(error), CollectiveLeft):
                self._check()  # it was let go because the epoch is over: that is what there is to tell
            own_error = error
        answers.ranks, failed = self._drain(deadline, own_failed=own_error is not None)
        self.last_seconds = self._progress.end(command.seq)
        if isinstance(answers.own, ErrorReply):
            own_error = RankError(0, answers.own.kind, answers.own.message)
        if own_error is not None or failed:
            log.error(
                "a command failed",
                command=command_name,
                seq=command.seq,
                ms=round(1000 * self.last_seconds),
                leader=repr(own_error),
                ranks=[str(error) for error in failed],
                exc_info=None if collective_failure(own_error) else own_error,
                action="fan_out",
            )
            log.debug("failure of the leader's part", command=command_name, exc_info=own_error, action="fan_out")
            raise GroupError(command_name, own_error, failed) from own_error

    def _send(self, command: Command, deadline: commands.Deadline) -> None:
        """Let a command go out to the other ranks, and have its arrival and their replies awaited."""
        under_way = commands.post(self._client, self._lease, command, self._rank_worker.world_size)

        def listen() -> list[AnyReply]:
            commands.posted(under_way, self._check)
            return self._replies.collect(command.seq, deadline, self._check)

        self._background.send(listen)

    def _drain(self, deadline: commands.Deadline | None, own_failed: bool) -> tuple[list[AnyReply], list[RankError]]:
        """Account for one reply per rank. After the leader's own failure the others get a moment, not the deadline:
        they may be waiting for it in a collective, and its error must not be hidden behind their silence. `deadline` is
        None for a leader alone."""
        if deadline is None:
            return [], []
        if own_failed:
            deadline.hurry(DRAIN_S)
        try:
            replies = self._background.answer()
        except EpochOver as over:
            if not own_failed:
                raise
            return [], [RankError(over.rank, "forward_failed", over.message)] if isinstance(over, Poisoned) else []
        return replies, [RankError(r.rank, r.kind, r.message) for r in replies if isinstance(r, ErrorReply)]

    def _all(self, kind: type[T], replies: Sequence[Reply]) -> list[T]:
        """`replies` as `kind`; a reply of another kind is quoted."""
        for rank, reply in enumerate(replies):
            if not isinstance(reply, kind):
                raise GroupError("reply", None, [RankError(rank, "bad_request", f"unexpected reply {reply}")])
        return replies  # type: ignore[return-value]  # each was checked
