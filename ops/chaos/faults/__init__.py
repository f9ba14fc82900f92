"""The faults by name, in one file per family."""

from __future__ import annotations

from control.engines import OWN
from ops.chaos.faults import large_log, moments, network, processes, replicas, servers
from ops.chaos.faults.fault import Fault
from ops.chaos.faults.processes import ENGINE_FAULTS, ON_ANY_FARM
from ops.chaos.faults.servers import FAILOVERS

OF_ONE_SERVER: dict[str, Fault] = {
    **processes.FAULTS,
    **moments.FAULTS,
    **replicas.FAULTS,
    **large_log.FAULTS,
    **servers.FAULTS,
    **network.FAULTS,
}
FAULTS = OF_ONE_SERVER | FAILOVERS | ENGINE_FAULTS
OF_REPLICATED = (*processes.FAULTS, *moments.FAULTS, *FAILOVERS)
OF_ENGINES = (
    *ENGINE_FAULTS,
    "leader-kill",
    "leader-stop",
    "agent-kill",
    "agent-and-rank-kill",
    "api-kill",
    *servers.FAULTS,
    *network.FAULTS,
)
"""Those that make sense for a model on an external engine."""


def suited(topology: str, engine: str = OWN) -> list[str]:
    """The kinds that make sense for a Redis of that topology, and for a model on that engine."""
    if topology == "server":
        return list(OF_ONE_SERVER if engine == OWN else OF_ENGINES)
    if engine == OWN:
        return list(OF_REPLICATED)
    return [name for name in (*OF_ENGINES, *FAILOVERS) if name in ENGINE_FAULTS or name in OF_REPLICATED]
