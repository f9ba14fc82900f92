"""The faults by name. One file per family, each with a table of its own."""

from __future__ import annotations

from ops.chaos.faults import moments, network, processes, servers
from ops.chaos.faults.fault import Fault
from ops.chaos.faults.processes import ON_ANY_FARM

__all__ = ["FAULTS", "ON_ANY_FARM", "Fault"]

FAULTS: dict[str, Fault] = {**processes.FAULTS, **moments.FAULTS, **servers.FAULTS, **network.FAULTS}
