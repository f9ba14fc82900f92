"""A Redis Cluster: the table of its slots, commands that follow redirections, and clients for threads and asyncio.

redis-py's Cluster client asks a server for the keys of each XREAD, which costs a rank one more round trip per read.
It also connects when it is made, refuses `evalsha` in pipelines, and fails a whole pipeline when one shard is down.
Furrow's calls name their keys, so a table of slots is enough, with redis-py's connections and commands.

`Shards`, `Routing` and the generators that return an `Exchange` do no I/O: they are written once for threads and for
asyncio. `Cluster` and `AsyncCluster` send what they yield. Both connect at their first command, as the clients of one
server do, and a node that can't be reached fails its own commands only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import redis
import redis.asyncio
from redis import exceptions as redis_errors
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from control.redis.pipeline import ABSENT, Pipeline, RedisCommand, exchange
from control.redis.urls import Address

T = TypeVar("T")

Client = TypeVar("Client", redis.Redis, redis.asyncio.Redis)


MOST_HOPS = 5
"""Redirections that a command follows before its last answer stands."""

_WITHOUT_KEY = frozenset(
    ("PING", "INFO", "CONFIG", "FLUSHALL", "FLUSHDB", "SCRIPT", "CLUSTER", "CLIENT", "TIME", "DBSIZE", "DEBUG", "ECHO")
)

_KEY_AFTER_SUBCOMMAND = frozenset(("XINFO", "XGROUP", "OBJECT", "MEMORY"))

_SCOUTING: dict[str, Any] = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0}


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
    """The table of slots as last read. If it is `stale`, it is read again before the next command."""

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
class NodeBatch:
    """Commands for one node, by their index; with `asking` each goes there before its slot does."""

    place: Address
    asking: bool
    indices: list[int]


class Routing:
    """One exchange: `batches()` until there are none, `take()` the replies of each; then `replies` has them all."""

    def __init__(self, shards: Shards, commands: Sequence[RedisCommand]) -> None:
        self._shards = shards
        self._commands = commands
        self._waiting: dict[int, Address | None] = dict.fromkeys(range(len(commands)))
        """Index of each command without a reply, and the node that it was told to ask."""
        self._hops = 0
        self.replies: list[Any] = [None] * len(commands)

    @property
    def waiting(self) -> bool:
        """A command has no reply yet."""
        return bool(self._waiting)

    def batches(self) -> list[NodeBatch]:
        """The commands to send now, for each node in their order."""
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
        return [NodeBatch(place, asking, indices) for (place, asking), indices in batches.items()]

    def _place(self, index: int) -> Address | None:
        key = routing_key(self._commands[index].words)
        return self._shards.owner(key) if key is not None else next(iter(self._shards.primaries), None)

    def packed(self, batch: NodeBatch) -> Iterator[RedisCommand]:
        """The words that go over the wire for a batch."""
        for index in batch.indices:
            if batch.asking:
                yield RedisCommand(("ASKING",))
            yield self._commands[index]

    def take(self, batch: NodeBatch, replies: Sequence[Any]) -> None:
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

    def failed(self, batch: NodeBatch, error: Exception) -> None:
        """The node did not answer: its commands fail, the others' don't."""
        self._shards.stale = True
        for index in batch.indices:
            self.replies[index] = error


@dataclass(frozen=True, slots=True)
class Sending:
    """Commands for one node. A scout has a connection of its own: a hung node must not delay the answers of others."""

    place: Address
    commands: list[RedisCommand]
    scout: bool = False


Exchange = Generator[Sequence[Sending], list[list[Any] | Exception], T]
"""Sendings that go at once, and for each its replies, or why its node did not answer. `T` is the result."""


def learning(shards: Shards) -> Exchange[None]:
    """Read the table again if it is stale. Raises redis-py's ConnectionError where no node has one."""
    last: Exception = redis_errors.ConnectionError("the Cluster serves no slots yet")
    for place in shards.sources if shards.stale else ():
        [outcome] = yield [Sending(place, [RedisCommand(("CLUSTER", "SLOTS"))], scout=True)]
        if isinstance(outcome, Exception):
            last = outcome
            continue
        ranges = _first(outcome)
        if ranges:
            shards.learn(ranges, place)
            return
    if shards.stale:
        raise last


def exchanging(shards: Shards, commands: Sequence[RedisCommand]) -> Exchange[list[Any]]:
    """The replies in order, after all redirections; an exception in the place of each command that failed. The table is
    read at the begin alone: a node that has not heard of a move yet must not undo what a redirection said."""
    routing = Routing(shards, commands)
    yield from learning(shards)
    while routing.waiting:
        batches = routing.batches()
        outcomes = yield [Sending(batch.place, list(routing.packed(batch))) for batch in batches]
        for batch, outcome in zip(batches, outcomes, strict=True):
            if isinstance(outcome, Exception):
                routing.failed(batch, outcome)
            else:
                routing.take(batch, outcome)
    return routing.replies


def executing(shards: Shards, command: RedisCommand) -> Exchange[Any]:
    """The reply of one command. One without a key goes to every primary, and the first one's reply is its reply."""
    if routing_key(command.words) is not None:
        return _first((yield from exchanging(shards, [command])))
    yield from learning(shards)
    outcomes = yield [Sending(place, [command]) for place in shards.primaries]
    return _first([reply for outcome in outcomes for reply in (outcome if isinstance(outcome, list) else [outcome])])


def _first(replies: Sequence[Any]) -> Any:
    """The first reply; raises the first error among them."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies[0]


class Cluster(redis.Redis):
    """For threads."""

    def __init__(self, places: Sequence[Address], **options: Any) -> None:
        super().__init__(host=places[0][0], port=places[0][1], **options)
        self.shards = Shards(places)
        self._nodes = _Nodes(redis.Redis, options)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        return Routed(self, executing(self.shards, RedisCommand(args, options))).replies()

    def depart(self, commands: Sequence[RedisCommand]) -> Routed[list[Any]]:
        """The first half of an exchange."""
        Routed(self, learning(self.shards)).replies()
        return Routed(self, exchanging(self.shards, commands))

    def primaries(self) -> list[redis.Redis]:
        """A client of each primary. Raises redis-py's ConnectionError while no node answers."""
        Routed(self, learning(self.shards)).replies()
        return [self._nodes.client(place) for place in self.shards.primaries]

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Any:
        raise NotImplementedError("a Cluster has no pipeline of its own: use control.redis.connection.run_all")

    def close(self) -> None:
        for node in self._nodes.clients.values():
            node.close()
        super().close()

    def send(self, sending: Sending) -> Pipeline | list[Any] | Exception:
        """The commands on their way; of a scout the replies. What its node could not be reached for is returned."""
        try:
            if not sending.scout:
                return Pipeline(self._nodes.client(sending.place), sending.commands)
            with self._nodes.scout(sending.place) as scout:
                return Pipeline(scout, sending.commands).replies()
        except ABSENT as error:
            return error


class Routed(Generic[T]):
    """An exchange whose first commands are on their way to the nodes that have their keys."""

    def __init__(self, cluster: Cluster, exchange: Exchange[T]) -> None:
        self._cluster = cluster
        self._exchange = exchange
        self._result: T | None = None
        self._under_way = self._send(None)

    def _send(self, outcomes: Any) -> list[Pipeline | list[Any] | Exception] | None:
        """Send what follows from the outcomes; None where the exchange is over."""
        try:
            return [self._cluster.send(sending) for sending in self._exchange.send(outcomes)]
        except StopIteration as end:
            self._result = end.value
            return None

    def replies(self) -> T:
        """The result of the exchange."""
        while self._under_way is not None:
            self._under_way = self._send([_arrived(sent) for sent in self._under_way])
        return self._result  # type: ignore[return-value]


def _arrived(sent: Pipeline | list[Any] | Exception) -> list[Any] | Exception:
    try:
        return sent.replies() if isinstance(sent, Pipeline) else sent
    except ABSENT as error:
        return error


class AsyncCluster(redis.asyncio.Redis):
    """For asyncio, as `Cluster`."""

    def __init__(self, places: Sequence[Address], **options: Any) -> None:
        super().__init__(host=places[0][0], port=places[0][1], **options)
        self.shards = Shards(places)
        self._nodes = _Nodes(redis.asyncio.Redis, options)
        self._turn = itertools.count()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await self._run(executing(self.shards, RedisCommand(args, options)))

    async def exchange(self, commands: Sequence[RedisCommand]) -> list[Any]:
        """The replies in order, an exception in the place of each command that failed."""
        return await self._run(exchanging(self.shards, commands))

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Any:
        raise NotImplementedError("a Cluster has no pipeline of its own: use control.redis.connection.arun_all")

    def pubsub(self, **kwargs: Any) -> Any:
        """Of the next node in turn: what is published anywhere reaches subscribers everywhere."""
        places = self.shards.primaries or self.shards.sources
        return self._nodes.client(places[next(self._turn) % len(places)]).pubsub(**kwargs)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        for node in self._nodes.clients.values():
            await node.aclose(close_connection_pool)
        await super().aclose(close_connection_pool)

    async def _run(self, exchange: Exchange[T]) -> T:
        try:
            sendings = next(exchange)
            while True:
                sendings = exchange.send(await asyncio.gather(*map(self._send, sendings)))
        except StopIteration as end:
            return end.value

    async def _send(self, sending: Sending) -> list[Any] | Exception:
        try:
            if not sending.scout:
                return await exchange(self._nodes.client(sending.place), sending.commands)
            async with self._nodes.scout(sending.place) as scout:
                return await exchange(scout, sending.commands)
        except ABSENT as error:
            return error


class _Nodes(Generic[Client]):
    """A client of each node, made when it is first needed."""

    def __init__(self, kind: type[Client], options: dict[str, Any]) -> None:
        self._kind = kind
        self._options = options
        self.clients: dict[Address, Client] = {}

    def client(self, place: Address) -> Client:
        if place not in self.clients:
            self.clients[place] = self._kind(host=place[0], port=place[1], **self._options)
        return self.clients[place]

    def scout(self, place: Address) -> Client:
        """A client that reads the table, to be closed after it."""
        return self._kind(host=place[0], port=place[1], **(self._options | _SCOUTING))


def servers_of(client: redis.Redis) -> list[redis.Redis]:
    """The servers behind a client: the primaries of a Cluster, else the client itself."""
    return client.primaries() if isinstance(client, Cluster) else [client]
