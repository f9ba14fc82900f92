"""The agent of one host: runs what the farm assigned to it, notices what died or hangs, and takes its turn at planning.

It never imports torch and never touches a device. Its processes are children of the host's supervisor: the next agent
adopts them when this one dies.
"""

from __future__ import annotations

import os
import time
from typing import Any

import structlog

from control.errors import RedisUnavailable
from control.host_memory import available
from control.placement import farm, membership
from control.placement.placement import Host
from control.placement.rollout import Place
from control.redis.clients import SyncRedis
from control.redis.outage import outage
from worker.agent.host_replicas import HostReplicas, HostView, Reporter, adopt_standby, read_host
from worker.agent.planner import Planner
from worker.agent.rank_exits import RankExits
from worker.agent.reconciliation import Reconciler
from worker.agent.standby import Standby
from worker.agent.supervision.client import SupervisorClient
from worker.rank.reachability import Reachability

log = structlog.get_logger()

TICK_S = 0.2
STEADY_TICK_S = 0.4
"""Between two ticks while every replica serves. Exits are handled at once all the same."""
IDLE_S = 30.0
"""Time without a model on this host after which its standby ends. One is there from the start: it imports while the
first model's files are found."""
SILENT_S = 5.0
"""An agent whose loop made no turn for this time is not healthy."""
PLANS_S = 2.0
"""An agent that last got the placement lock so long ago does not hold it any more."""
LOOP = "agent"
"""Name of this loop in log lines about an outage of Redis."""


class Agent:
    """One host's agent. `run` returns after `stopping` was set and every rank has ended, or once it is `leaving`."""

    def __init__(
        self,
        client: SyncRedis,
        redis_url: str,
        host: Host,
        supervisor: SupervisorClient,
        standby: Standby | None = None,
    ) -> None:
        self._client = client
        self._host = host
        self._supervisor = supervisor
        self._standby = standby
        reporter = Reporter(client, host.id)
        self.replicas = HostReplicas(client, redis_url, host.id, supervisor, standby, reporter)
        self._reconciler = Reconciler(client, host.id, self.replicas, reporter, host.memory)
        self._exits = RankExits(client, supervisor, host.id, self.replicas, reporter)
        self._reachability = Reachability()
        self._planner = Planner(client, lambda model, replica, why: reporter.report(model, replica, "unplaceable", why))
        self._used_at = time.monotonic()
        self.stopping = False
        self.leaving = False
        """True once another agent is to replace this one; it adopts every process."""
        self.turned_at = time.monotonic()
        """The last turn of the loop, by the monotonic clock."""
        self._planned_at = -PLANS_S
        self._on_demand = False
        """True while there are models on demand: a rank may have to be started soon."""

    def run(self) -> None:
        """Adopt running ranks, then tick until stopped; an exit is handled as soon as it is reported."""
        self.adopt()
        log.info("agent ready", host=self._host.id, devices=list(self._host.devices) or ["cpu"], action="agent_start")
        while not self.leaving and (not self.stopping or self.replicas.by_place):
            self._supervisor.alive()
            self.turned_at = time.monotonic()
            try:
                self.tick()
                self._reachability.note()
                outage.goes_on(LOOP)
            except RedisUnavailable as error:
                outage.waits(LOOP, error)
            except Exception:  # the agent must survive an unforeseen error: it is the one that restarts the others
                log.exception("agent tick failed", action="agent_tick")
            try:
                self._exits.wait(self.tick_s)
            except RedisUnavailable as error:  # it is reported when Redis is back
                outage.waits(LOOP, error)
        self._reconciler.close()
        if self._standby is not None and not self.leaving:
            self._standby.stop()

    def stop(self) -> None:
        """End every rank, then `run`; for any thread."""
        self.stopping = True
        self.replicas.hurry()

    def adopt(self) -> None:
        """Go on with the processes of the agent before this one, if there was any."""
        if self.replicas.adopt():
            self._reachability.start_grace()
        adopt_standby(self._supervisor, self._standby)

    def tick(self) -> None:
        """One turn of the loop, in one round trip where nothing changes. Raises RedisUnavailable."""
        self._exits.tell_late()
        if self.stopping:
            self.replicas.stop()
            self.replicas.tend({})
            self._tend_standby()
        else:
            view = self._beat_and_plan()
            self._reconciler.reconcile(view)
            self._tend_standby()  # before the first ranks of a host, which are to be forked from it
            self.replicas.tend(view.looks)
        self.replicas.record()

    @property
    def tick_s(self) -> float:
        """Seconds until the next tick."""
        replicas = self.replicas.by_place.values()
        if self.stopping or self._reconciler.preparing or not replicas or self._on_demand:
            return TICK_S
        serve = all(
            replica.served and not (replica.attempts or replica.draining or replica.stopping) for replica in replicas
        )
        return STEADY_TICK_S if serve else TICK_S

    def _beat_and_plan(self) -> HostView:
        """Beat, take a turn at planning if it is this agent's, and read what this host is to run."""
        standby = self._standby.state if self._standby is not None else "off"
        beat = membership.host_beat(self._host, os.getpid(), available(), standby)
        first = [*beat, farm.has_on_demand(), farm.hold_placement(self._host.id)]
        (*_, self._on_demand, plans), view = read_host(self._client, self._host.id, self._reconciler.worlds, first)
        if plans:
            self._planned_at = time.monotonic()
            # After an absence of Redis the other hosts' heartbeats have lapsed without their fault.
            if self._reachability.steady and self._planner.tend():
                _, view = read_host(self._client, self._host.id, self._reconciler.worlds)
        return view

    @property
    def plans(self) -> bool:
        """True while this agent holds the placement lock; for any thread."""
        return time.monotonic() - self._planned_at < PLANS_S

    def places(self) -> list[Place]:
        """The replicas of this host, by model and name; for any thread."""
        return list(self.replicas.by_place)

    def health(self) -> dict[str, Any]:
        """The state of the loop, and the pids of the ranks; for any thread."""
        silent_s = time.monotonic() - self.turned_at
        ranks = {
            f"{model}:{name}": {str(rank): process.pid for rank, process in list(replica.processes.items())}
            for (model, name), replica in list(self.replicas.by_place.items())
        }
        return {"ok": silent_s < SILENT_S, "silent_s": round(silent_s, 1), "plans": self.plans, "replicas": ranks}

    def _tend_standby(self) -> None:
        """Keep one while anything runs, and for a while after the start."""
        if (standby := self._standby) is None:
            return
        now = time.monotonic()
        models = {preparation for replica in self.replicas.alive if (preparation := replica.preparation) is not None}
        if models or self._reconciler.preparing or self._on_demand:
            self._used_at = now
        if self.stopping or now > self._used_at + IDLE_S:
            standby.stop()
        else:
            serving = any(replica.served for replica in self.replicas.alive)
            standby.tend(sorted(models), serving=serving)
