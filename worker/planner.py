"""The placement turn of the agent that holds the placement lock: plan, write what hosts shall do, tidy up."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from control import catalog, farm
from control.clients import SyncRedis
from control.messages import Assignment, ModelSpec
from control.placement import Action, Assign, Unplaceable, Withdraw, plan
from control.requests.waiting import abandon, expire_waiting

log = structlog.get_logger()

EXPIRE_EVERY_S = 1.0
"""Between looks for waiting requests whose deadline has passed."""

Report = Callable[[str, str, str], None]
"""(model, replica, why): the replica can't be placed."""


class Planner:
    """Stateless but for its clock: any agent may take over in the next turn."""

    def __init__(self, client: SyncRedis, unplaceable: Report) -> None:
        self._client, self._unplaceable = client, unplaceable
        self._expired = 0.0

    def turn(self) -> None:
        """Bring assignments in line with the desired models."""
        specs = catalog.list_specs(self._client)
        held = {host: farm.assignments(self._client, host) for host in farm.known_hosts(self._client)}
        hosts = farm.living_hosts(self._client)
        living = {host.id for host in hosts}
        for action in plan(specs, hosts, held):
            self._write(action, held, living)
        self._tidy(specs, held)

    def _write(self, action: Action, held: dict[str, list[Assignment]], living: set[str]) -> None:
        match action:
            case Assign(host, assignment):
                log.info("assigns", host=host, model=assignment.spec.name, replica=assignment.replica)
                farm.assign(self._client, host, assignment)
            case Withdraw(host, model, replica) if host not in living:
                farm.remove_assignment(self._client, host, model, replica)
            case Withdraw(host, model, replica):
                for assignment in held[host]:
                    if (assignment.spec.name, assignment.replica) == (model, replica) and not assignment.withdrawn:
                        farm.withdraw(self._client, host, assignment)
            case Unplaceable(model, replica, why):
                self._unplaceable(model, replica, why)

    def _tidy(self, specs: list[ModelSpec], held: dict[str, list[Assignment]]) -> None:
        """Forget models whose ranks have all ended, and end the requests that no leader is there to end."""
        assigned = {assignment.spec.name for assignments in held.values() for assignment in assignments}
        for spec in specs:
            if spec.unload and spec.name not in assigned:
                ended = abandon(self._client, spec.name, f"the model '{spec.name}' was unloaded")
                catalog.forget(self._client, spec)
                log.info("unloaded", model=spec.name, ended_requests=ended)
        if time.monotonic() - self._expired >= EXPIRE_EVERY_S:
            self._expired = time.monotonic()
            for spec in specs:
                if expired := expire_waiting(self._client, spec.name):
                    log.warning("waiting requests passed their deadline", model=spec.name, requests=expired)
