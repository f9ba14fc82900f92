"""The struck farm's Redis where another server can take over: a primary under Sentinels, or a Cluster."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager

from control.redis.connection import connect
from ops.chaos.system.servers import Node
from ops.chaos.system.topologies import ClusterTopology, SentinelTopology, cluster, sentinel

TOPOLOGIES = ("server", "sentinel", "cluster")


class Replicated:
    """Stands where `ServerProcess` stands in a target; what can be done to it is a failover. `key` names the shard."""

    def __init__(self, topology: SentinelTopology | ClusterTopology, key: str) -> None:
        self._topology, self._key = topology, key
        self.url = topology.url
        self.client = connect(topology.url)

    @property
    def primary(self) -> Node:
        """The one that has the farm's model now."""
        if isinstance(self._topology, ClusterTopology):
            return self._topology.primary_of(self._key)
        return self._topology.primary

    def lag(self) -> None:
        """From now on the replica misses what the primary takes."""
        if isinstance(self._topology, ClusterTopology):
            self._topology.lag(self._key)
        else:
            self._topology.lag()

    def fail_over(self) -> Node:
        """Kill the primary; the next one."""
        if isinstance(self._topology, ClusterTopology):
            return self._topology.fail_over(self._key)
        return self._topology.fail_over()

    def heal(self) -> None:
        """Let the dead one come back as a replica, and wait until it has everything."""
        self._topology.heal()


@contextmanager
def replicated(topology: str, key: str) -> Generator[Replicated]:
    """`topology` is sentinel or cluster: a primary and its replica, or three of these."""
    with sentinel() if topology == "sentinel" else cluster(replicas=1) as servers:
        found = Replicated(servers, key)
        with closing(found.client):
            yield found
