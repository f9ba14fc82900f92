"""A Redis Cluster, and a primary with a replica under Sentinels, as private servers to fail over.

with sentinel() as redis:
    …  # a farm on redis.url
    redis.lag()        # the replica hears no more of the primary
    redis.fail_over()  # kill -9 of the primary; the replica takes over without what it has missed
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import exceptions as redis_errors
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from ops.chaos.system.servers import PASSWORD, Node, free_ports
from ops.common.waiting import until
from ops.local.server_binary import find_server

DOWN_AFTER_MS = 500
"""Silence after which a primary is taken for dead."""
NAME = "farm"
"""The primary's name with the Sentinels."""
_DATA = (
    f'save ""\nrequirepass {PASSWORD}\nmasterauth {PASSWORD}\nrepl-diskless-sync-delay 0\nrepl-ping-replica-period 1'
)


def _lag(primary: Node, replicas: Sequence[Node]) -> None:
    """Cut the replicas off: they keep what they have and can't come back, because their password is wrong."""
    for replica in replicas:
        replica.ask("CONFIG", "SET", "masterauth", "cut")
    primary.ask("CLIENT", "KILL", "TYPE", "replica")


@dataclass
class SentinelTopology:
    """A primary, its replicas and the Sentinels that watch them."""

    data: list[Node]
    sentinels: list[Node]

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://:{PASSWORD}@{places}/{NAME}"

    @property
    def primary(self) -> Node:
        """The one that the Sentinels name."""
        for sentinel in self.sentinels:
            with contextlib.suppress(redis_errors.RedisError, OSError):
                _, port = sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
                return next(node for node in self.data if node.port == int(port))
        raise RuntimeError("no Sentinel answers")

    def primary_of(self, key: str) -> Node:
        """As ClusterTopology's: one primary has all keys."""
        return self.primary

    def lag(self, key: str = "") -> None:
        """From now on the replicas miss what the primary takes."""
        primary = self.primary
        _lag(primary, [node for node in self.data if node is not primary and node.alive])

    def fail_over(self, key: str = "") -> Node:
        """Kill the primary and wait for the next one, which is returned. The dead one stays so until `heal`."""
        was = self.primary
        was.kill()
        now = until(lambda: self.primary if self.primary is not was else None, "the Sentinels name a new primary")
        until(lambda: now.ask("ROLE")[0] == "master", "the new primary has its role")
        return now

    def heal(self) -> None:
        """Start what is dead, and wait until every replica follows the primary and the Sentinels know it."""
        primary = self.primary
        for node in self.data:
            if not node.alive:
                node.start()
            node.ask("CONFIG", "SET", "masterauth", PASSWORD)
        others = [node for node in self.data if node is not primary]
        until(lambda: all(map(_follows, others)), "every replica follows the primary")
        counts = (len(others), len(self.sentinels))
        until(lambda: all(_knows(sentinel, *counts) for sentinel in self.sentinels), "the Sentinels know all servers")


@contextmanager
def sentinel(replicas: int = 1, sentinels: int = 3, binary: Path | None = None) -> Generator[SentinelTopology]:
    """A primary with replicas, each with the password PASSWORD, and the Sentinels; ready when it is handed out."""
    binary = binary or find_server().path
    with _folder() as folder:
        ports = free_ports(1 + replicas + sentinels)
        follow = f"{_DATA}\nreplicaof 127.0.0.1 {ports[0]}"
        data = [Node(binary, folder, port, _DATA if port == ports[0] else follow) for port in ports[: 1 + replicas]]
        config = "\n".join(
            [
                f"sentinel monitor {NAME} 127.0.0.1 {ports[0]} {sentinels // 2 + 1}",
                f"sentinel auth-pass {NAME} {PASSWORD}",
                f"sentinel down-after-milliseconds {NAME} {DOWN_AFTER_MS}",
                f"sentinel failover-timeout {NAME} 2000",
            ]
        )
        watching = [Node(binary, folder, port, config, ("--sentinel",), password="") for port in ports[1 + replicas :]]
        topology = SentinelTopology(data, watching)
        with _running([*data, *watching]):
            for node in watching:
                _hurry(node)
            topology.heal()
            yield topology


def _hurry(sentinel: Node) -> None:
    """Have it talk more often than each second or two, where its version can: so that a failover is quick to begin."""
    # A replica whose INFO is older than five pings is passed over in an election, and it is asked once a second then.
    periods = ("INFO-PERIOD", 200, "PUBLISH-PERIOD", 200, "ASK-PERIOD", 100, "PING-PERIOD", 300)
    with contextlib.suppress(redis_errors.ResponseError):
        sentinel.ask("SENTINEL", "DEBUG", *periods)


def _follows(replica: Node) -> bool:
    try:
        role = replica.ask("ROLE")
    except redis_errors.ConnectionError:  # a Sentinel that changes a server's role ends its connections
        return False
    return role[0] == "slave" and role[3] == "connected"


def _knows(sentinel: Node, replicas: int, sentinels: int) -> bool:
    flat = sentinel.ask("SENTINEL", "MASTER", NAME)
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return (
        fields["flags"] == "master"
        and int(fields["num-slaves"]) >= replicas
        and int(fields["num-other-sentinels"]) == sentinels - 1
    )


@dataclass
class ClusterTopology:
    """The nodes of a Cluster: as many primaries as shards at first, then their replicas in the same order."""

    nodes: list[Node]
    shards: int

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://:{PASSWORD}@{places}"

    @property
    def primaries(self) -> list[Node]:
        """The ones that serve slots, as a living node sees it."""
        return [self._at(place[1]) for _, _, place, *_ in self._slots()]

    def primary_of(self, key: str) -> Node:
        """The node that serves the key's slot."""
        slot = key_slot(key.encode(), REDIS_CLUSTER_HASH_SLOTS)
        return next(self._at(place[1]) for first, last, place, *_ in self._slots() if first <= slot <= last)

    def replicas_of(self, key: str) -> list[Node]:
        """The living replicas of the key's shard."""
        primary = self.primary_of(key)
        shard = self.nodes[self.nodes.index(primary) % self.shards :: self.shards]
        return [node for node in shard if node is not primary and node.alive]

    def lag(self, key: str) -> None:
        """From now on the replicas of the key's shard miss what its primary takes."""
        _lag(self.primary_of(key), self.replicas_of(key))

    def fail_over(self, key: str) -> Node:
        """Kill the primary of the key's shard and wait for the next one, which is returned."""
        was = self.primary_of(key)
        was.kill()
        return until(
            lambda: now if (now := self.primary_of(key)) is not was and self._whole() else None,
            "the shard has a new primary",
        )

    def heal(self) -> None:
        """Start what is dead, and wait until the Cluster is whole."""
        for node in self.nodes:
            if not node.alive:
                node.start()
            node.ask("CONFIG", "SET", "masterauth", PASSWORD)
        until(self._whole, "the Cluster serves all slots")
        primaries = self.primaries
        until(lambda: all(node in primaries or _follows(node) for node in self.nodes), "every replica follows")

    def _whole(self) -> bool:
        return all("cluster_state:ok" in node.ask("CLUSTER", "INFO") for node in self.nodes if node.alive)

    def _slots(self) -> list[list[Any]]:
        living = next(node for node in self.nodes if node.alive)
        return living.ask("CLUSTER", "SLOTS")

    def _at(self, port: int) -> Node:
        return next(node for node in self.nodes if node.port == port)


@contextmanager
def cluster(shards: int = 3, replicas: int = 0, binary: Path | None = None) -> Generator[ClusterTopology]:
    """A Cluster with `replicas` for each shard; every slot is served when it is handed out."""
    binary = binary or find_server().path
    with _folder() as folder:
        nodes = []
        for port in free_ports(shards * (1 + replicas), bus=True):
            config = (
                f"{_DATA}\ncluster-enabled yes\ncluster-config-file {port}.nodes\n"
                f"cluster-node-timeout {DOWN_AFTER_MS}\ncluster-replica-validity-factor 0"
            )
            nodes.append(Node(binary, folder, port, config))
        topology = ClusterTopology(nodes, shards)
        with _running(nodes):
            _form(topology)
            yield topology


def _form(topology: ClusterTopology) -> None:
    nodes = topology.nodes
    shards = topology.shards
    for index, node in enumerate(nodes):
        node.ask("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        if index:
            node.ask("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
    bounds = [REDIS_CLUSTER_HASH_SLOTS * shard // shards for shard in range(shards + 1)]
    for node, first, end in zip(nodes, bounds, bounds[1:], strict=False):
        node.ask("CLUSTER", "ADDSLOTS", *range(first, end))
    count = f"cluster_known_nodes:{len(nodes)}"
    until(lambda: all(count in node.ask("CLUSTER", "INFO") for node in nodes), "every node knows the others")
    for index, replica in enumerate(nodes[shards:]):
        of = nodes[index % shards].ask("CLUSTER", "MYID")
        until(lambda replica=replica, of=of: of in replica.ask("CLUSTER", "NODES"), "the replica knows its primary")
        replica.ask("CLUSTER", "REPLICATE", of)
    topology.heal()


@contextmanager
def _running(nodes: Sequence[Node]) -> Generator[None]:
    try:
        for node in nodes:
            node.start()
        yield
    finally:
        for node in nodes:
            node.kill()


@contextmanager
def _folder() -> Generator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="furrow-redis-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
