"""Clients of a Redis Cluster, for threads and for asyncio: redis-py's commands, sent to the node that has the key.

They connect at their first command, as the clients of one server do. `exchange` is the pipeline: it follows
redirections, and a node that can't be reached fails its own commands only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import redis
import redis.asyncio
from redis import exceptions as redis_errors

from control.redis.routing.shards import Batch, Command, Routing, Shards, routing_key
from control.redis.routing.wire import Wire
from control.redis.urls import Address

ABSENT = (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError)
_SCOUTING: dict[str, Any] = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0}
"""Options of a connection that reads the table: a hung node must not delay the answers of others."""


class Cluster(redis.Redis):
    """For threads. A command without a key goes to every primary, and the first one's reply is its reply."""

    def __init__(self, nodes: Sequence[Address], **options: Any) -> None:
        super().__init__(host=nodes[0][0], port=nodes[0][1], **options)
        self.shards = Shards(nodes)
        self._options = options
        self._nodes: dict[Address, redis.Redis] = {}

    def execute_command(self, *args: Any, **options: Any) -> Any:
        command = Command(args, options)
        if routing_key(args) is None:
            replies = [Wire(node, [command]).replies()[0] for node in self.primaries()]
        else:
            replies = self.exchange([command])
        return _first(replies)

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """The replies in order, an exception in the place of each command that failed."""
        return self.depart(commands).replies()

    def depart(self, commands: Sequence[Command]) -> Routed:
        """The first half of `exchange`."""
        return Routed(self, commands)

    def primaries(self) -> list[redis.Redis]:
        """A client of each primary. Raises redis-py's ConnectionError while no node answers."""
        self.learn()
        return [self._node(place) for place in self.shards.primaries]

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Any:
        raise NotImplementedError("a Cluster has no pipeline of its own: use control.redis.connection.run_all")

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()
        super().close()

    def send(self, batches: Sequence[Batch], routing: Routing) -> list[tuple[Batch, Wire]]:
        """Send the batches; one whose node can't be reached has failed."""
        sent: list[tuple[Batch, Wire]] = []
        for batch in batches:
            try:
                sent.append((batch, Wire(self._node(batch.place), list(routing.packed(batch)))))
            except ABSENT as error:
                routing.failed(batch, error)
        return sent

    def _node(self, place: Address) -> redis.Redis:
        if place not in self._nodes:
            self._nodes[place] = redis.Redis(host=place[0], port=place[1], **self._options)
        return self._nodes[place]

    def learn(self) -> None:
        """Read the table again if it is stale."""
        last: Exception = redis_errors.ConnectionError("the Cluster serves no slots yet")
        for place in self.shards.sources if self.shards.stale else ():
            options: dict[str, Any] = self._options | _SCOUTING
            try:
                with redis.Redis(host=place[0], port=place[1], **options) as scout:
                    scout.response_callbacks.pop("CLUSTER SLOTS", None)
                    ranges: Any = scout.execute_command("CLUSTER SLOTS")
            except ABSENT as error:
                last = error
                continue
            if ranges:
                self.shards.learn(ranges, place)
                return
        if self.shards.stale:
            raise last


class Routed:
    """Commands on their way to the nodes that have their keys."""

    def __init__(self, cluster: Cluster, commands: Sequence[Command]) -> None:
        self._cluster = cluster
        self._routing = Routing(cluster.shards, commands)
        self._sent = self._send()

    def _send(self) -> list[tuple[Batch, Wire]]:
        self._cluster.learn()
        return self._cluster.send(self._routing.batches(), self._routing)

    def replies(self) -> list[Any]:
        """The replies in order, after all redirections; an exception in the place of each command that failed."""
        while self._sent:
            for batch, wire in self._sent:
                try:
                    self._routing.take(batch, wire.replies())
                except ABSENT as error:
                    self._routing.failed(batch, error)
            self._sent = self._send()
        return self._routing.replies


class AsyncCluster(redis.asyncio.Redis):
    """For asyncio, as `Cluster`."""

    def __init__(self, nodes: Sequence[Address], **options: Any) -> None:
        super().__init__(host=nodes[0][0], port=nodes[0][1], **options)
        self.shards = Shards(nodes)
        self._options = options
        self._nodes: dict[Address, redis.asyncio.Redis] = {}
        self._turn = itertools.count()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        command = Command(args, options)
        if routing_key(args) is None:
            await self._learn()
            sent = [self._send(place, [command]) for place in self.shards.primaries]
            replies = [reply for [reply] in await asyncio.gather(*sent)]
        else:
            replies = await self.exchange([command])
        return _first(replies)

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """The replies in order, an exception in the place of each command that failed."""
        routing = Routing(self.shards, commands)
        await self._learn()
        while batches := routing.batches():
            await asyncio.gather(*(self._run(routing, batch) for batch in batches))
        return routing.replies

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Any:
        raise NotImplementedError("a Cluster has no pipeline of its own: use control.redis.connection.arun_all")

    def pubsub(self, **kwargs: Any) -> Any:
        """Of the next node in turn: what is published anywhere reaches subscribers everywhere."""
        places = self.shards.primaries or self.shards.sources
        return self._node(places[next(self._turn) % len(places)]).pubsub(**kwargs)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        for node in self._nodes.values():
            await node.aclose(close_connection_pool)
        await super().aclose(close_connection_pool)

    async def _run(self, routing: Routing, batch: Batch) -> None:
        try:
            routing.take(batch, await self._send(batch.place, list(routing.packed(batch))))
        except ABSENT as error:
            routing.failed(batch, error)

    async def _send(self, place: Address, commands: Sequence[Command]) -> list[Any]:
        pipeline = self._node(place).pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command.words, **command.options)
        return await pipeline.execute(raise_on_error=False)

    def _node(self, place: Address) -> redis.asyncio.Redis:
        if place not in self._nodes:
            self._nodes[place] = redis.asyncio.Redis(host=place[0], port=place[1], **self._options)
        return self._nodes[place]

    async def _learn(self) -> None:
        """Read the table again if it is stale."""
        last: Exception = redis_errors.ConnectionError("the Cluster serves no slots yet")
        for place in self.shards.sources if self.shards.stale else ():
            options: dict[str, Any] = self._options | _SCOUTING
            try:
                async with redis.asyncio.Redis(host=place[0], port=place[1], **options) as scout:
                    scout.response_callbacks.pop("CLUSTER SLOTS", None)
                    ranges: Any = await scout.execute_command("CLUSTER SLOTS")
            except ABSENT as error:
                last = error
                continue
            if ranges:
                self.shards.learn(ranges, place)
                return
        if self.shards.stale:
            raise last


def _first(replies: Sequence[Any]) -> Any:
    """The first reply; raises the first error among them."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies[0]
