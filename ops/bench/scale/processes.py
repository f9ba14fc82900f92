"""The agents and API processes of a farm that has settled: what each asks of Redis in a tick or a second, whatever
clients do, and the agent that plans in its turn."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from types import TracebackType

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from api.background.orphans import OrphanReaper
from api.models.models import ModelRegistry
from api.settings import ApiSettings
from control import keys
from control.messages import Assignment, ModelAssets
from control.placement import farm, membership
from control.placement.placement import Host
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import Call, run, run_every
from control.replicas import health
from control.replicas.health import Beat
from control.replicas.lease import Lease, acquire, holder
from control.version import VERSION
from ops.bench.scale.clock import Round, watch
from ops.bench.scale.crowd import Size
from worker.agent.agent import Agent
from worker.agent.host_replicas import ReplicaRecord, record_key
from worker.agent.planner import Planner
from worker.agent.supervision.client import SupervisorClient
from worker.agent.supervision.wire import encode_line

_TOGETHER = 10
"""Agents whose ticks are watched together: between them everything beats, which is not counted."""
_ASSETS = ModelAssets(
    tokenizer_json=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str(),
    tokenizer_config={},
    chat_template=None,
    generation_config={},
    context_length=4096,
    vocab_size=2,
    eos_ids=[0],
    kv_tokens=100_000,
    created=1_700_000_000,
)


class Agents:
    """Hosts whose replicas all serve. A real planner placed them; the agents are real, and their processes are not.

    A context manager: it closes the agents' sockets.
    """

    def __init__(self, client: SyncRedis, url: str, size: Size) -> None:
        self._client, self._sockets = client, list[socket.socket]()
        self._hosts = [Host(f"host-{index:03}") for index in range(size.agents)]
        self._planner = Planner(client, _refuse)
        self._beats: list[Call[None]] = []
        self._beat()
        self._planner.turn()
        self._agents = [self._agent(url, host) for host in self._hosts]

    def __enter__(self) -> Agents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._sockets:
            connection.close()

    def ticks(self) -> list[Round]:
        """A tick of each agent, none of which plans; several agents a round. The first tick, in which an agent reports
        the replicas that it has adopted, is not counted."""
        self._client.set(keys.PLACEMENT_LOCK, "another", px=600_000)
        parts = [self._agents[at : at + _TOGETHER] for at in range(0, len(self._agents), _TOGETHER)]
        rounds: list[Round] = []
        for _ in range(2):
            rounds = [self.watch(lambda part=part: [agent.tick() for agent in part]) for part in parts]
        self._client.delete(keys.PLACEMENT_LOCK)
        return rounds

    @property
    def tick_s(self) -> float:
        """Seconds between two ticks of an agent."""
        return min(agent.tick_s for agent in self._agents)

    def turns(self, count: int) -> list[Round]:
        """As many placement turns, as often as an agent makes them."""
        rounds: list[Round] = []
        for _ in range(count):
            due = time.monotonic() + self.tick_s
            rounds.append(self.watch(self._planner.turn))
            time.sleep(max(0.0, due - time.monotonic()))
        return rounds

    def unsettle(self) -> None:
        """Ask for a new revision of a model: the planner reads how all replicas are until its own are replaced."""
        spec = catalog.list_specs(self._client)[0]
        catalog.put_spec(self._client, spec, again=True)

    def watch(self, act: Callable[[], object]) -> Round:
        """A round of anything beside replicas that all serve."""
        self._beat()
        return watch(self._client, act)

    def _beat(self) -> None:
        for host in self._hosts:
            membership.beat_host(self._client, host, os.getpid(), 1 << 30)
        run_every(self._client, self._beats)

    def _agent(self, url: str, host: Host) -> Agent:
        """The host's agent after it has adopted the ranks of all its assignments."""
        records: dict[str, object] = {}
        children: list[dict[str, object]] = []
        for assignment in farm.assignments(self._client, host.id):
            lease = self._led(host, assignment)
            place = assignment.place
            records[record_key(place)] = _record(assignment, lease.epoch)
            tag = {"kind": "rank", "model": place[0], "replica": place[1], "rank": 0, "version": VERSION}
            children.append({"pid": os.getpid(), "tag": tag, "started": 0.0, "said": [], "status": None})
        here, there = socket.socketpair()
        there.sendall(encode_line({"event": "welcome", "kept": records, "children": children}))
        self._sockets += [here, there]
        agent = Agent(self._client, url, host, SupervisorClient(here))
        agent.adopt()
        return agent

    def _led(self, host: Host, assignment: Assignment) -> Lease:
        """The replica serves: it has a leader, which beats, and its agent has said so."""
        model = assignment.spec.name
        replica = assignment.replica
        lease = run(self._client, acquire(model, replica, f"{host.id}/{os.getpid()}", 1))
        if lease is None:  # the replica whose requests are logged
            owner, _, epoch = (run(self._client, holder(model, replica)) or "").rpartition(":")
            lease = Lease(model, replica, owner, int(epoch))
        self._client.pexpire(lease.keys.lock, 600_000)
        run(self._client, catalog.put_assets(model, _ASSETS))
        health.write_status(self._client, model, replica, "running", "", host=host.id, tp=1)
        word = Beat(
            epoch=lease.epoch,
            seq=1,
            oldest_pending_ms=0,
            device="cpu",
            memory_bytes=1 << 30,
            phase="ready",
            pid=os.getpid(),
            host=host.id,
        )
        self._beats.append(health.beat(model, replica, 0, word))
        return lease


def _record(assignment: Assignment, epoch: int) -> object:
    """As an earlier agent left it with its supervisor."""
    record = ReplicaRecord(assignment=assignment, folder="", served=True, seen={os.getpid(): epoch})
    return msgspec.to_builtins(record, str_keys=True)


def _refuse(model: str, replica: str, why: str) -> None:
    raise AssertionError(f"{model} {replica}: {why}")


_RIGHTS = (keys.REAPER_LOCK, keys.OVERVIEWS_LOCK)


class ApiProcesses:
    """The background work of the API processes. They share one ModelRegistry, so that tokenizers are read once."""

    def __init__(self, client: SyncRedis, agents: Agents, size: Size) -> None:
        self._client = client
        self._agents = agents
        self._names = [f"api-{index}" for index in range(size.apis)]
        self._models = ModelRegistry(client, ApiSettings(redis_url=""))
        asyncio.run(self._models.look(shared=True))

    def rounds(self) -> list[Round]:
        """A second of each: two heartbeats, its part in reaping, and its look at the models. The first does for all
        what one process in a second does; it keeps that right, however long the others take one after the other."""
        for key in _RIGHTS:
            self._client.delete(key)
        rounds: list[Round] = []
        for name in self._names:
            reaper = OrphanReaper(self._client, name)
            for each in self._names:
                self._beat(each)
            rounds.append(self._agents.watch(lambda name=name, reaper=reaper: self._second(name, reaper)))
            for key in _RIGHTS:
                self._client.set(key, "the first", px=600_000)
            self._client.persist(keys.OVERVIEWS)
        for key in (*_RIGHTS, keys.OVERVIEWS):
            self._client.delete(key)
        return rounds

    def _second(self, name: str, reaper: OrphanReaper) -> None:
        self._beat(name)
        self._beat(name)
        reaper.reap()
        asyncio.run(self._models.look(shared=True))

    def _beat(self, name: str) -> None:
        run_every(self._client, membership.beat_api(name, f"http://{name}", int(time.time())))
