"""Ranks 1..N-1: read a command, execute it, reply; leave the epoch when it is over and wait for the next."""

from __future__ import annotations

import time
from typing import get_args

import msgspec
import structlog

from control.commands import AnyCommand, Bye, ErrorReply, Reply, ShutdownRank, decode_command
from control.errors import EpochOver, RankError, RankErrorKind, RedisUnavailable
from control.redis.clients import SyncRedis
from control.redis.outage import outage
from control.replicas import commands, health
from worker.detectors import UNKNOWN_STEP_S
from worker.rank.counters import Counters
from worker.rank.heartbeat import Progress
from worker.rank.rank_worker import RankWorker

log = structlog.get_logger()

POLL_S = 0.05
"""Interval of the reads of the epoch; it bounds what waiting adds to a recovery."""
BLOCK_MS = 500
LOOP = "commands"
"""Name of this loop in log lines about an outage of Redis."""


class Envelope(msgspec.Struct):
    """The part of a command that can be decoded even if its op is unknown."""

    op: str


KNOWN_OPS = frozenset(struct.__struct_config__.tag for struct in get_args(AnyCommand))


class Rank:
    def __init__(
        self,
        client: SyncRedis,
        blocking: SyncRedis,
        heartbeat: SyncRedis,
        model: str,
        replica: str,
        rank_worker: RankWorker,
        counters: Counters | None = None,
    ) -> None:
        self._counters = counters or Counters()
        self._client = client
        self._blocking = blocking
        self._heartbeat_client = heartbeat
        self._model = model
        self._replica = replica
        self._rank_worker = rank_worker
        self.stopping = False

    def stop(self) -> None:
        """Let `run` return at the next silence of the leader."""
        self.stopping = True

    def run(self) -> None:
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
                self._rank_worker.leave()

    def _wait_for_epoch(self, last: int) -> int | None:
        """The first epoch after `last` that is led and not poisoned; None when stopped. An epoch without a leader is
        passed over: its commands are still readable, but its peers may be gone."""
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
        progress = Progress(self._rank_worker, self._counters)
        progress.phase = "ready"
        mailbox = commands.Mailbox(self._blocking, self._model, self._replica, epoch, self._rank_worker.rank)
        client = self._heartbeat_client
        with self._rank_worker.heartbeat(client, self._model, self._replica, epoch, progress) as heartbeat:
            while True:
                heartbeat.check()
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
        if isinstance(command, ShutdownRank):
            log.info("told to shut down", action="rank_stop")
        try:
            return self._rank_worker.answer(command)
        except EpochOver:
            raise
        except Exception as error:
            # Unknown, so device or collective state can't be trusted: tell the leader, poison, and leave.
            log.exception(
                "command failed",
                seq=command.seq,
                op=type(command).__name__,
                requests=self._rank_worker.requests,
                action="poison",
            )
            message = f"{type(error).__name__}: {error}"
            refusal = self._rank_worker.refusal(command, RankError(self._rank_worker.rank, "forward_failed", message))
            commands.reply(self._client, self._model, self._replica, refusal)
            health.write_poison(
                self._client,
                self._model,
                self._replica,
                command.epoch,
                self._rank_worker.rank,
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
        return ErrorReply(epoch=epoch, seq=seq, rank=self._rank_worker.rank, kind=kind, message=message)
