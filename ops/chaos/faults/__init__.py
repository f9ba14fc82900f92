"""The faults by name, in one file per family."""

from __future__ import annotations

from control.engines import OWN
from ops.chaos.faults import engines, failover, large_log, moments, network, processes, replicas, servers
from ops.chaos.faults.fault import Fault
from ops.chaos.faults.processes import ON_ANY_FARM

FAULTS: dict[str, Fault] = {
    **processes.FAULTS,
    **moments.FAULTS,
    **replicas.FAULTS,
    **large_log.FAULTS,
    **servers.FAULTS,
    **network.FAULTS,
    **failover.FAULTS,
    **engines.FAULTS,
}


def suited(topology: str, engine: str = OWN) -> list[str]:
    """The kinds that make sense for a Redis of that topology, and for a model on that engine."""
    if engine != OWN and topology == "server":
        return list(engines.KINDS)
    if engine != OWN:
        return [name for name in (*engines.KINDS, *failover.FAULTS) if name in engines.FAULTS or name in failover.KINDS]
    alone = [name for name in FAULTS if name not in failover.FAULTS and name not in engines.FAULTS]
    return alone if topology == "server" else list(failover.KINDS)
