"""The primary that has the farm's model is killed, and its replica takes over, which may lag."""

from __future__ import annotations

import random

from ops.chaos.errors import NoEffect
from ops.chaos.faults import moments, processes
from ops.chaos.faults.fault import Fault
from ops.chaos.system.servers import ServerProcess
from ops.chaos.system.target import Target
from ops.common.waiting import NotInTime

LAG_S = (0.1, 0.5)
"""How long a replica that lags has missed what the primary took."""


def strike_primary(lags: bool) -> Fault:
    """Kill the primary; with `lags` its replica has been cut off a moment before."""

    def strike(target: Target, random: random.Random) -> str:
        servers = target.server
        if isinstance(servers, ServerProcess):
            raise NoEffect("one server has nobody who takes over; use --topology sentinel or cluster")
        was = servers.primary_of(target.shard_key)
        if lags:
            servers.lag(target.shard_key)
            target.rest(random.uniform(*LAG_S))
        try:
            now = servers.fail_over(target.shard_key)
        except NotInTime as error:
            raise NoEffect(f"no replica took over from port {was.port}: {error}") from error
        finally:
            servers.heal()
        return f"primary at port {was.port} -> {now.port}{', which lagged' if lags else ''}"

    return strike


FAULTS: dict[str, Fault] = {"failover": strike_primary(lags=False), "failover-lagging": strike_primary(lags=True)}
KINDS = (*processes.FAULTS, *moments.FAULTS, *FAULTS)
"""The kinds of faults for a farm whose Redis is replicated."""
