"""The table of a Redis Cluster's slots, and the way of commands through redirections. Pure: no I/O.

redis-py's Cluster client asks a server for the keys of each XREAD, which costs a rank one more round trip per read. It
also connects when it is made, and fails a whole pipeline when one shard is down. Furrow's calls name their keys, so a
table of slots is enough (docs/decisions/0007).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import exceptions as redis_errors
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from control.redis.urls import Address

MOST_HOPS = 5
"""Redirections that a command follows before its last answer stands."""

_WITHOUT_KEY = frozenset(
    ("PING", "INFO", "CONFIG", "FLUSHALL", "FLUSHDB", "SCRIPT", "CLUSTER", "CLIENT", "TIME", "DBSIZE", "DEBUG", "ECHO")
)
_KEY_AFTER_SUBCOMMAND = frozenset(("XINFO", "XGROUP", "OBJECT", "MEMORY"))


@dataclass(frozen=True, slots=True)
class Command:
    """The words of a command, and redis-py's options for reading its reply."""

    words: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def routing_key(words: Sequence[Any]) -> str | None:
    """The key that decides which node gets the command; None for one without a key."""
    flat = [*str(words[0]).split(" "), *words[1:]]
    name = str(flat[0]).upper()
    if name in _WITHOUT_KEY:
        return None
    if name in ("EVAL", "EVALSHA"):
        at = 3
    elif name in ("XREAD", "XREADGROUP"):
        at = next(i for i, word in enumerate(flat) if _text(word).upper() == "STREAMS") + 1
    else:
        at = 2 if name in _KEY_AFTER_SUBCOMMAND else 1
    return _text(flat[at]) if len(flat) > at else None


def _text(word: Any) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)


class Shards:
    """The table of slots as last heard. `stale` asks for it to be read again before the next command."""

    def __init__(self, seeds: Sequence[Address]) -> None:
        self._seeds = tuple(seeds)
        self._owners: dict[int, Address] = {}
        self.stale = True

    @property
    def primaries(self) -> list[Address]:
        """Every node that serves slots, in a steady order."""
        return sorted(set(self._owners.values()))

    @property
    def sources(self) -> list[Address]:
        """The nodes to ask for the table: those that the URL names, then all others."""
        return list(dict.fromkeys((*self._seeds, *self.primaries)))

    def owner(self, key: str) -> Address | None:
        """The primary of the key's slot; None while nobody serves it."""
        return self._owners.get(key_slot(key.encode(), REDIS_CLUSTER_HASH_SLOTS))

    def learn(self, ranges: Sequence[Sequence[Any]], node: Address) -> None:
        """Take the reply of CLUSTER SLOTS: `[first slot, last slot, [host, port, …], replicas …]` for each range."""
        owners: dict[int, Address] = {}
        for first, last, primary, *_ in ranges:
            # A node that does not know its own name answers with none: it is reached as it was asked.
            place = (str(primary[0] or node[0]), int(primary[1]))
            owners.update(dict.fromkeys(range(int(first), int(last) + 1), place))
        self._owners = owners
        self.stale = False

    def moved(self, slot: int, place: Address) -> None:
        self._owners[slot] = place
        self.stale = True  # where one slot went, others went too


@dataclass(frozen=True, slots=True)
class Batch:
    """Commands for one node, by their index; with `asking` each goes there before its slot does."""

    place: Address
    asking: bool
    indices: list[int]


class Routing:
    """One exchange: `batches()` until there are none, `take()` the replies of each; then `replies` has them all."""

    def __init__(self, shards: Shards, commands: Sequence[Command]) -> None:
        self._shards = shards
        self._commands = commands
        self._waiting: dict[int, Address | None] = dict.fromkeys(range(len(commands)))
        """Index of each command without a reply, and the node that it was told to ask."""
        self._hops = 0
        self.replies: list[Any] = [None] * len(commands)

    def batches(self) -> list[Batch]:
        """The commands to send now, for each node in their order. Call it with a table that is not stale."""
        batches: dict[tuple[Address, bool], list[int]] = {}
        for index, target in self._waiting.items():
            place = target or self._place(index)
            if place is None:
                self.replies[index] = redis_errors.ConnectionError("no node of the Cluster serves this slot now")
                self._shards.stale = True
            else:
                batches.setdefault((place, target is not None), []).append(index)
        self._waiting = {}
        self._hops += 1
        return [Batch(place, asking, indices) for (place, asking), indices in batches.items()]

    def _place(self, index: int) -> Address | None:
        key = routing_key(self._commands[index].words)
        return self._shards.owner(key) if key is not None else next(iter(self._shards.primaries), None)

    def packed(self, batch: Batch) -> Iterator[Command]:
        """The words that go over the wire for a batch."""
        for index in batch.indices:
            if batch.asking:
                yield Command(("ASKING",))
            yield self._commands[index]

    def take(self, batch: Batch, replies: Sequence[Any]) -> None:
        """The replies to `packed(batch)`; redirections are followed, everything else is final."""
        for index, reply in zip(batch.indices, replies[1::2] if batch.asking else replies, strict=True):
            self.replies[index] = reply
            if isinstance(reply, redis_errors.AskError):  # MOVED is one too
                place = (reply.host or batch.place[0], reply.port)
                moved = isinstance(reply, redis_errors.MovedError)
                if moved:
                    self._shards.moved(reply.slot_id, place)
                if self._hops < MOST_HOPS:
                    self._waiting[index] = None if moved else place
            elif isinstance(reply, (redis_errors.ClusterDownError, redis_errors.ReadOnlyError)):
                self._shards.stale = True

    def failed(self, batch: Batch, error: Exception) -> None:
        """The node did not answer: its commands fail, the others' don't."""
        self._shards.stale = True
        for index in batch.indices:
            self.replies[index] = error
