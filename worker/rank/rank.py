"""Ranks 1..N-1: read a command, execute it, reply; leave the epoch when it is over and wait for the next."""

from __future__ import annotations

import time
from typing import get_args

import msgspec
import structlog

from control.commands import AnyCommand, Shutdown, decode_command
from control.errors import EpochOver, RankError, RankErrorKind, RedisUnavailable
from control.redis.clients import SyncRedis
from control.redis.outage import outage
from control.replicas import commands, health
from control.replies import Bye, ErrorReply, Reply
from worker.health.progress import UNKNOWN_STEP_S, Progress
from worker.health.pulse import Pulse
from worker.tp_group.executor import Executor

log = structlog.get_logger()

POLL_S = 0.05
"""Between looks for a new epoch; the bound on what waiting adds to a recovery."""
BLOCK_MS = 500
LOOP = "commands"
"""Its name where loops say that they wait for Redis."""


class Envelope(msgspec.Struct):
    """What any command carries, readable even where its op is unknown."""

    op: str


KNOWN_OPS = frozenset(struct.__struct_config__.tag for struct in get_args(AnyCommand))


class Rank:
    """One rank's life over all epochs of its replica."""

    def __init__(
        self,
        client: SyncRedis,
        blocking: SyncRedis,
        pulse: SyncRedis,
        model: str,
        replica: str,
        executor: Executor,
    ) -> None:
        self._client, self._blocking, self._pulse_client = client, blocking, pulse
        self._model, self._replica, self._executor = model, replica, executor
        self.stopping = False

    def run(self) -> None:
        """Serve epoch after epoch until told to shut down."""
        last = 0
        while not self.stopping:
            epoch = self._wait_for_epoch(last)
            if epoch is None:
                return
            last = epoch
            structlog.contextvars.bind_contextvars(epoch=epoch)
            try:
                self._serve(epoch)
            except (EpochOver, RedisUnavailable) as over:  # whatever was under way: the next epoch takes it up
                log.info("left the epoch", reason=str(over), action="leave_epoch")
            finally:
                self._executor.leave()

    def _wait_for_epoch(self, last: int) -> int | None:
        """The first epoch after `last` that is led and not poisoned already; None when told to stop.

        The newest epoch may have lost its leader with the whole host, unpoisoned and its commands still readable: a
        fresh process that obeyed them would wait for peers that are gone.
        """
        while not self.stopping:
            try:
                epoch = health.read_led_epoch(self._client, self._model, self._replica)
                poison = health.read_poison(self._client, self._model, self._replica)
                outage.goes_on(LOOP)
                if epoch > last and (poison is None or poison.epoch != epoch):
                    return epoch
            except RedisUnavailable as error:
                outage.waits(LOOP, error)
            time.sleep(POLL_S)
        return None

    def _serve(self, epoch: int) -> None:
        progress = Progress()
        progress.phase = "ready"
        executor = self._executor
        progress.read_share = lambda: executor.read_share
        progress.count = lambda: executor.progress
        mailbox = commands.Mailbox(self._blocking, self._model, self._replica, epoch, executor.rank)
        pulse = Pulse(
            self._pulse_client,
            self._model,
            self._replica,
            epoch,
            executor.rank,
            executor.world_size,
            executor.device,
            progress,
            at_end=executor.abort.say,
        )
        with pulse:
            while True:
                pulse.check()
                try:
                    frame = mailbox.receive(BLOCK_MS)
                except RedisUnavailable as error:  # hold still: the leader decides when it is back
                    outage.waits(LOOP, error)
                    continue
                outage.goes_on(LOOP)
                if frame is None:
                    if self.stopping:  # only in a silence: a leader that stops too still wants its commands answered
                        return
                    continue
                progress.begin(UNKNOWN_STEP_S)
                reply = self._answer(frame, epoch, mailbox.seq)
                progress.end(reply.seq)
                commands.reply(self._client, self._model, self._replica, reply)
                if isinstance(reply, Bye):
                    self.stopping = True
                    return

    def _answer(self, frame: str, epoch: int, seq: int) -> Reply:
        """Exactly one reply per frame, also for one that can't be understood: the peer stays alive."""
        try:
            command: AnyCommand = decode_command(frame)
        except msgspec.DecodeError as error:
            return self._unreadable(frame, epoch, seq, error)
        if isinstance(command, Shutdown):
            log.info("told to shut down", action="rank_stop")
        try:
            return self._executor.answer(command)
        except EpochOver:
            raise
        except Exception as error:
            # Unknown, so device or collective state can't be trusted: tell the leader, poison, and leave.
            log.exception("command failed", seq=command.seq, op=type(command).__name__, action="poison")
            message = f"{type(error).__name__}: {error}"
            refusal = self._executor.refusal(command, RankError(self._executor.rank, "forward_failed", message))
            commands.reply(self._client, self._model, self._replica, refusal)
            health.write_poison(
                self._client,
                self._model,
                self._replica,
                command.epoch,
                self._executor.rank,
                "forward_failed",
                message,
            )
            raise EpochOver(message) from error

    def _unreadable(self, frame: str, epoch: int, seq: int, error: msgspec.DecodeError) -> ErrorReply:
        """The refusal of a frame; where it came from says which command it was, as its own words may not."""
        try:
            op = msgspec.json.decode(frame, type=Envelope).op
        except msgspec.DecodeError:
            op = None
        unknown = op is not None and op not in KNOWN_OPS
        kind: RankErrorKind = "unknown_op" if unknown else "bad_request"
        message = f"unknown op {op!r}" if unknown else f"{error}: {frame[:200]!r}"
        log.error("refused a frame", kind=kind, error=message, action="refuse_command")
        return ErrorReply(epoch=epoch, seq=seq, rank=self._executor.rank, kind=kind, message=message)
