"""The faults by name. One file per family, each with a table of its own."""

from __future__ import annotations

from ops.chaos.faults import failover, moments, network, processes, servers
from ops.chaos.faults.fault import Fault

__all__ = ["FAULTS", "Fault"]

FAULTS: dict[str, Fault] = {
    **processes.FAULTS,
    **moments.FAULTS,
    **servers.FAULTS,
    **network.FAULTS,
    **failover.FAULTS,
}
