"""The thread that gathers the facts of this host and publishes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import msgspec
import structlog

from control.errors import RedisUnavailable
from control.messages import Assignment
from control.placement import farm
from control.placement.host_facts import LIFE_MS, HostFacts, facts_of_all, put_facts
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.redis.round_trip import measure
from worker.agent.facts.collection import collect
from worker.agent.facts.model_files import ModelFingerprints
from worker.agent.facts.ports import Endpoint, PortProbe, connect_to
from worker.rank.address import rendezvous_address

log = structlog.get_logger()

EVERY_S = LIFE_MS / 6000


class FactsPublisher:
    """Publishes at once, and every EVERY_S, until the process ends."""

    def __init__(self, client: SyncRedis, host_id: str, ranks: Callable[[], Mapping[str, str]]) -> None:
        """`client`: one of its own; `ranks`: the version of each rank of this host."""
        self._client, self._host_id, self._ranks = client, host_id, ranks
        self._files, self._probe = ModelFingerprints(), PortProbe()

    def start(self) -> None:
        threading.Thread(target=self._run, name="facts", daemon=True).start()

    def publish(self) -> None:
        """Gather and publish once. Raises RedisUnavailable."""
        trip = measure(self._client)
        facts = collect(trip, self._files.of(catalog.list_specs(self._client)), self._ranks())
        run(self._client, put_facts(self._host_id, self._with_ports(facts)))

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self.publish()
            except RedisUnavailable:  # the agent's loop logs it
                pass
            except Exception:  # a file system or a compiler with a fault of its own: the next turn may know more
                log.exception("facts can't be gathered", action="host_facts")
            pause.wait(EVERY_S)

    def _with_ports(self, facts: HostFacts) -> HostFacts:
        """The facts with the address of this host and the hosts that it reaches, while a replica spans several."""
        if not any(_is_part(one) for one in farm.assignments(self._client, self._host_id)):
            self._probe.close()
            return facts
        address = rendezvous_address(self._client)
        try:
            self._probe.open(address)
        except OSError as error:
            return msgspec.structs.replace(
                facts, address=address, ports={self._host_id: f"{address}: {error.strerror or error}"}
            )
        peers = peers_of(self._host_id, farm.all_assignments(self._client))
        endpoints = {
            host: Endpoint(one.address, one.port)
            for host, one in facts_of_all(self._client, peers).items()
            if one is not None and one.port
        }
        endpoint = self._probe.endpoint
        port = 0 if endpoint is None else endpoint.port
        return msgspec.structs.replace(facts, address=address, port=port, ports=connect_to(endpoints))


def peers_of(host_id: str, held: dict[str, list[Assignment]]) -> list[str]:
    """The other hosts that run a part of a replica of which this host runs one."""
    own = {(one.spec.name, one.replica) for one in held.get(host_id, ()) if _is_part(one)}
    return [
        host
        for host, assignments in held.items()
        if host != host_id and any((one.spec.name, one.replica) in own for one in assignments)
    ]


def _is_part(assignment: Assignment) -> bool:
    return len(assignment.ranks) < assignment.spec.tp
