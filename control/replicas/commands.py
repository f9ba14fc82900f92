"""Commands from a leader to its ranks and the replies: one stream per rank and epoch, numbered without a gap.

The epoch is in the key's name, so a stale command can't be read; the seq is the entry's id, so a repeated command
can't be added twice. A process that waits here is woken by the epoch's poison too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from control.commands import AnyReply, Command, Reply, decode_reply
from control.constants import COMMAND_MS
from control.errors import Lost, Poisoned, RedisUnavailable
from control.keys import ReplicaKeys
from control.messages import encode
from control.redis.clients import LONGEST_BLOCK_MS, SyncRedis
from control.redis.connection import Call, Entry, Posted, read_streams, run
from control.replicas.health import poison
from control.replicas.lease import Lease

T = TypeVar("T")

LATE_S = 0.1
"""A blocking read that returns so much later than asked for has met a server that did not serve."""


def fan_out(lease: Lease, command: Command | Sequence[Command], world_size: int) -> Call[None]:
    """`command` to ranks 1 to world_size - 1, all or none; a sequence holds one per rank, all with the same seq."""
    commands = [command] if isinstance(command, Command) else list(command)
    streams = tuple(lease.keys.commands(lease.epoch, rank) for rank in range(1, world_size))
    if len({(each.epoch, each.seq) for each in commands}) != 1 or commands[0].epoch != lease.epoch:
        raise ValueError(f"commands for epoch {lease.epoch} must carry it and share one seq: {commands}")
    if len(commands) not in (1, len(streams)):
        raise ValueError(f"{len(commands)} commands for {len(streams)} ranks")

    def parse(_: object) -> None:
        return None

    return Call("fan_out", streams, (commands[0].seq, *(encode(each) for each in commands)), parse)


def post(client: SyncRedis, lease: Lease, command: Command | Sequence[Command], world_size: int) -> Posted:
    """Begin to fan a command out; `posted` must follow, soon, as a server may ask for the script's text first."""
    return Posted(client, [fan_out(lease, command, world_size)])


def posted(under_way: Posted, check: Callable[[], None] = lambda: None) -> None:
    """Wait until the command is in every stream. Sits out an absence of Redis as long as the streams live, then
    raises Lost; or what `check` raises where the epoch is over."""
    _insist(under_way.values, check)


def send(client: SyncRedis, lease: Lease, command: Command | Sequence[Command], world_size: int) -> None:
    """Fan a command out, and wait as `posted` does; nothing to do for a world of 1."""
    if world_size > 1:
        posted(post(client, lease, command, world_size))


def reply(client: SyncRedis, model: str, replica: str, message: Reply) -> None:
    """Answer a command; sits out an absence of Redis as `send` does."""
    stream = ReplicaKeys(model, replica).replies(message.epoch)
    _insist(lambda: run(client, Call("reply", (stream,), (encode(message),), str)))


def wait_for_work(blocking: SyncRedis, lease: Lease, bell: str, block_ms: int) -> None:
    """Return once the bell rang after `bell` (the id that the last claim returned), or after `block_ms`.

    It rings for new requests, cancels and poison. Raises RedisUnavailable.
    """
    read_streams(blocking, {lease.model_keys.bell: bell}, block_ms)


def _insist(attempt: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
    """Repeat while Redis is away: a finished step is held, not lost.

    Raises Lost once the epoch's streams have lapsed, and with them whatever was in them.
    """
    until = time.monotonic() + COMMAND_MS / 1000
    while True:
        try:
            return attempt()
        except RedisUnavailable as error:
            if time.monotonic() > until:
                raise Lost(f"Redis has been away for longer than commands live: {error}") from error
            check()
            time.sleep(0.1)


class _PoisonWatch:
    """The history of poison, read from its beginning, so that none of this epoch is missed."""

    def __init__(self, stream: str, epoch: int) -> None:
        self.stream = stream
        self.after = "0"
        self._epoch = epoch

    def raise_own(self, entries: list[Entry]) -> None:
        """Raise Poisoned for an entry of this epoch."""
        for entry_id, fields in entries:
            self.after = entry_id
            if fields["epoch"] == str(self._epoch):
                raise Poisoned(fields["kind"], fields["message"], int(fields["rank"]))


class Mailbox:
    """A rank's commands in one epoch, in order."""

    def __init__(self, blocking: SyncRedis, model: str, replica: str, epoch: int, rank: int) -> None:
        keys = ReplicaKeys(model, replica)
        self._client = blocking
        self._model = model
        self._replica = replica
        self._epoch = epoch
        self._rank = rank
        self._stream = keys.commands(epoch, rank)
        self._poison = _PoisonWatch(keys.poisons, epoch)
        self._read: deque[Entry] = deque()
        self._seq = 0

    @property
    def seq(self) -> int:
        """Of the command received last, 0 before the first."""
        return self._seq

    def receive(self, block_ms: int) -> str | None:
        """The next command as JSON text, or None when none came within `block_ms`.

        Raises Poisoned when the epoch is; a gap in the seq poisons it first. Raises RedisUnavailable.
        """
        if not self._read:
            after = {self._stream: f"{self._seq}-0", self._poison.stream: self._poison.after}
            entries = read_streams(self._client, after, block_ms)
            self._poison.raise_own(entries.get(self._poison.stream, []))
            self._read.extend(entries.get(self._stream, []))
        if not self._read:
            return None
        entry_id, fields = self._read.popleft()
        seq = int(entry_id.partition("-")[0])
        if seq != self._seq + 1:
            message = f"rank {self._rank} expected command {self._seq + 1} and got {seq}"
            run(self._client, poison(self._model, self._replica, self._epoch, self._rank, "gap", message))
            raise Poisoned("gap", message, self._rank)
        self._seq = seq
        return fields["m"]


class Deadline:
    """A time limit for a wait. Another thread may shorten it while the wait goes on."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._final = False
        self._until = time.monotonic() + seconds

    def __str__(self) -> str:
        return f"{self._seconds:g} s"

    def remaining_s(self) -> float:
        """Seconds from now; 0 once it has passed."""
        return max(0.0, self._until - time.monotonic())

    def excuse(self, seconds: float) -> None:
        """Extend the limit by time that doesn't count, as an outage of Redis."""
        self._until += seconds

    def renew(self) -> None:
        """Restart the limit after progress."""
        if not self._final:
            self._until = max(self._until, time.monotonic() + self._seconds)

    def hurry(self, seconds: float) -> None:
        """Shorten the limit to `seconds` from now; progress extends it no more."""
        self._final = True
        if seconds < self.remaining_s():
            self._seconds = seconds
            self._until = time.monotonic() + seconds


class Replies:
    """A leader's view of its ranks' answers in one epoch. `stale` counts the ones that were dropped."""

    def __init__(self, blocking: SyncRedis, lease: Lease, world_size: int) -> None:
        self._client = blocking
        self._epoch = lease.epoch
        self._ranks = range(1, world_size)
        self._stream = lease.keys.replies(lease.epoch)
        self._poison = _PoisonWatch(lease.keys.poisons, lease.epoch)
        self._after = "0"
        self._early: dict[int, dict[int, AnyReply]] = {}
        self.stale = 0

    def collect(self, seq: int, deadline: Deadline, check: Callable[[], None] = lambda: None) -> list[AnyReply]:
        """Every rank's reply to command `seq`, in rank order; replies to later ones are kept for their turn.

        `check` is called now and then; it raises where the epoch is over. Without it a reply that was lost with Redis
        would be waited for until the deadline.

        Raises Poisoned: the epoch's, or of kind "deadline" naming the ranks that are missing (its rank is the first of
        them), or of kind "bad_reply" quoting one that can't be read. While Redis is away or does not answer
        in time the deadline stands still.
        """
        while True:
            here = self._early.get(seq, {})
            missing = [rank for rank in self._ranks if rank not in here]
            if not missing:
                self._early.pop(seq, None)
                return [here[rank] for rank in self._ranks]
            remaining_s = deadline.remaining_s()
            if not remaining_s:
                names = ", ".join(map(str, missing))
                message = f"no reply to command {seq}, and no progress, within {deadline}: rank {names}"
                raise Poisoned("deadline", message, missing[0])
            check()
            now = time.monotonic()
            block_ms = min(int(1000 * remaining_s), LONGEST_BLOCK_MS)
            try:
                self._read(seq, block_ms)
                away = time.monotonic() - now - block_ms / 1000
            except RedisUnavailable:
                away = time.monotonic() - now
            if away > LATE_S:
                deadline.excuse(away)

    def _read(self, seq: int, block_ms: int) -> None:
        after = {self._stream: self._after, self._poison.stream: self._poison.after}
        entries = read_streams(self._client, after, block_ms)
        self._poison.raise_own(entries.get(self._poison.stream, []))
        for entry_id, fields in entries.get(self._stream, []):
            self._after = entry_id
            self._keep(fields["m"], seq)

    def _keep(self, text: str, seq: int) -> None:
        try:
            message = decode_reply(text)
        except msgspec.DecodeError as error:
            raise Poisoned("bad_reply", f"a reply can't be read ({error}): {text[:200]!r}", -1) from error
        replies = self._early.get(message.seq, {})
        if (
            message.epoch != self._epoch
            or message.seq < seq
            or message.rank in replies
            or message.rank not in self._ranks
        ):
            self.stale += 1
            return
        self._early.setdefault(message.seq, {})[message.rank] = message
