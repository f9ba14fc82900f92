"""Models on demand, for the agent that plans: their requests are looked at, and they are woken and put to sleep."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import structlog

from control.keys import CLASSES, METERED, ModelKeys
from control.messages import ModelAssets, ModelSpec
from control.placement import farm
from control.placement.demand import (
    Demand,
    ModelOnDemand,
    Traffic,
    WakePlan,
    WakePlanner,
    follow,
    rooms_for_waking,
    with_replicas,
)
from control.placement.farm import FRESH_S, WHOLE_EVERY_S, FarmView
from control.placement.placement import Needs, Parts, ReplicaCounts
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run, run_every, run_steps
from control.replicas import health, model_overviews
from control.replicas.memory_deaths import server_ms
from control.replicas.model_overviews import ModelLoad, Overview, load_of, queued_of
from control.requests.upkeep.stranded import abandon

log = structlog.get_logger()

NOTE_EVERY_S = 20.0
NOTE_TENANT_MS = 20_000
"""A tenant that waits is noted so often."""
MOST_TENANTS = 64
"""So many of the tenants that wait for a model are looked at."""


class OnDemand:
    """Stateless but for what can be looked up again: any agent may take over in the next turn."""

    def __init__(self, client: SyncRedis) -> None:
        self._client = client
        self._specs: dict[str, ModelSpec] = {}
        """Those of the last turn: one that Redis loses while its model sleeps is on no host."""
        self._asleep: list[str] = []
        self.waking = False
        """True while a model was woken that does not serve yet: the time of its load is to be known."""
        self.quiet: set[str] = set()
        """Models that slept at the last turn and had no requests."""
        self._slept: dict[str, Demand] = {}
        """Their demands, which this agent alone writes while it plans."""
        self._turned_at = -FRESH_S
        self._whole_at = -WHOLE_EVERY_S
        self._noted = -NOTE_EVERY_S

    def called(self) -> bool:
        """True if a model that sleeps has requests, or was called. Raises RedisUnavailable."""
        return any(run_every(self._client, [*map(queued_of, self._asleep), *map(farm.is_called, self._asleep)]))

    def restore(self, specs: Collection[ModelSpec]) -> None:
        """Bring back what Redis has lost of models that sleep: no host has them. One that was unloaded is still among
        those that were ever loaded."""
        lost = self._specs.keys() - {spec.name for spec in specs}
        for name in lost:
            if not run(self._client, read("SISMEMBER", METERED, name, parse=bool)):
                log.warning("a model that Redis lost is desired again", model=name, action="restore_model")
                catalog.restore_spec(self._client, self._specs[name])

    def turn(
        self,
        view: FarmView,
        needs: Needs,
        awaited: Collection[str],
        stuck: Collection[str],
        assets: Mapping[str, ModelAssets | None],
    ) -> ReplicaCounts:
        """The number of replicas of each model on demand that are to run now. Writes the demands that change.
        `awaited`: models whose memory is not known yet; `stuck`: those that could not be placed in the last turn,
        though nothing left. `assets`: of the models that no leader has loaded yet, as they were read from their files,
        None where they can't be. Raises RedisUnavailable."""
        self.restore(view.specs)
        specs = [spec for spec in view.specs if spec.on_demand and not spec.unload]
        self._specs = {spec.name: spec for spec in specs}
        if not specs:
            self._asleep = []
            self.quiet = set()
            self.waking = False
            return {}
        self._note()
        now, quiet, seen = self._look(specs, stuck)
        replicas_of = _replicas_by_model(view)
        # Of the others, which sleep and have no request, there is nothing more to know: there may be many.
        active = [
            spec.name
            for spec, published, _, load in seen
            if published is None or published.replicas or load.queued or spec.name in replicas_of
        ]
        overviews = {
            overview.model: overview for overview in run_steps(self._client, model_overviews.reading_overviews(active))
        }
        models = [ModelOnDemand(spec, quiet[spec.name], Traffic()) for spec in specs if spec.name in quiet]
        changed = dict[str, Demand]()
        for spec, published, was_called, load in seen:
            name = spec.name
            replicas = replicas_of.get(spec.name, {})
            demand = published or with_replicas(Demand(replicas=0), len(replicas) or spec.least_replicas, now)
            if name in stuck and not replicas:
                demand = msgspec.structs.replace(with_replicas(demand, 0, now), waiting=demand.waiting or now)
            if (name in active and name not in overviews) or not self._publish(spec, demand, assets):
                continue  # it is gone by now, or its files are being read
            if demand.revision != spec.revision:
                first = demand.replicas or int(assets.get(name) is None)
                demand = msgspec.structs.replace(with_replicas(demand, first, now), revision=spec.revision)
            traffic = _traffic(load, overviews.get(name), was_called and not demand.replicas)
            after = follow(spec, demand, traffic, now)
            if after.loaded and not demand.loaded:
                log.info("model loaded", model=name, load_s=after.load_ms / 1000, action="model_load")
            if after != published:
                changed[name] = after
            models.append(ModelOnDemand(spec, after, traffic, replicas))
        woken = self._wake(models, view, needs, awaited, now)
        changed |= woken.demands
        for model in models:
            name = model.spec.name
            demand = changed.get(model.spec.name, model.demand)
            if demand.detail != (detail := woken.waits.get(name, "")):
                changed[name] = msgspec.structs.replace(demand, detail=detail)
        self._write(changed, {model.spec.name: model for model in models}, woken)
        counts = {model.spec.name: changed.get(model.spec.name, model.demand).replicas for model in models}
        self._asleep = [name for name, count in counts.items() if count == 0]
        self._slept = {
            model.spec.name: model.demand
            for model in models
            if counts[model.spec.name] == 0 and model.spec.name not in changed and not model.traffic.open
        }
        self.quiet = set(self._slept)
        self.waking = any(
            model.demand.replicas and not (model.demand.loaded or model.demand.failed) for model in models
        )
        self.waking = self.waking or bool(woken.demands)
        return counts

    def _look(
        self, specs: list[ModelSpec], stuck: Collection[str]
    ) -> tuple[int, dict[str, Demand], list[tuple[ModelSpec, Demand | None, bool, ModelLoad]]]:
        """The server's time; the demands of models that sleep on; and of the others each with its demand, whether it
        was called, and its load. Of a model that slept at the last turn only its calls and its queue are looked at."""
        at = time.monotonic()
        is_fresh = at - self._turned_at < FRESH_S and at - self._whole_at < WHOLE_EVERY_S
        self._turned_at = at
        if not is_fresh:
            self._whole_at = at
        slept = [spec for spec in specs if is_fresh and self._sleeps_on(spec, stuck)]
        names = [spec.name for spec in slept]
        reads: list[Call[Any]] = [server_ms(), *map(queued_of, names), *map(farm.is_called, names)]
        now, *replies = run_every(self._client, reads)
        signs = zip(names, replies[: len(names)], replies[len(names) :], strict=True)
        quiet = {name: self._slept[name] for name, queued, was_called in signs if not (queued or was_called)}
        others = [spec for spec in specs if spec.name not in quiet]
        looks = [(farm.demand_of(spec.name), farm.is_called(spec.name), load_of(spec.name)) for spec in others]
        answers = run_every(self._client, [call for calls in looks for call in calls])
        return now, quiet, list(zip(others, answers[::3], answers[1::3], answers[2::3], strict=True))

    def _sleeps_on(self, spec: ModelSpec, stuck: Collection[str]) -> bool:
        """True if a model that slept at the last turn sleeps on, unless it is called or has requests."""
        demand = self._slept.get(spec.name)
        is_same = demand is not None and demand.revision == spec.revision
        return is_same and spec.least_replicas == 0 and spec.name not in stuck

    def _publish(self, spec: ModelSpec, demand: Demand, assets: Mapping[str, ModelAssets | None]) -> bool:
        """Give API processes the assets of a model that sleeps at a revision that no leader has loaded; False while its
        files are being read. One whose files can't be read is loaded once, so that they come or the fault is told."""
        if demand.revision == spec.revision or demand.replicas:
            return True
        if spec.name not in assets:
            return False
        if (model_assets := assets[spec.name]) is not None:
            run(self._client, catalog.put_assets(spec.name, model_assets))
        return True

    def _wake(
        self, models: list[ModelOnDemand], view: FarmView, needs: Needs, awaited: Collection[str], now: int
    ) -> WakePlan:
        called = [model for model in models if model.demand.replicas == 0 and model.traffic.queued]
        ready = [model for model in models if model.spec.name not in awaited]
        if not called or not ready:
            return WakePlan()
        tenants = self._tenants([model.spec.name for model in called])
        may_evict = self._may_evict(tenants, len(models), now)
        uses = health.kv_uses(self._client, view.by_host, needs)
        rooms = rooms_for_waking(view.hosts, needs, view.by_host, view.specs, models, uses)
        woken = WakePlanner(ready, *rooms, now).wake(may_evict)
        evicting = [name for name, gave_way in woken.gave_way.items() if gave_way]
        notes = [farm.note_tenant(tenant, evicted=True) for name in evicting for tenant in tenants.get(name, ())]
        if notes:
            run_every(self._client, [call for calls in notes for call in calls])
        return woken

    def _tenants(self, models: list[str]) -> dict[str, list[str]]:
        """Tenants whose requests wait, by model."""
        calls = [
            read("ZRANGE", ModelKeys(model).waiting(priority), 0, MOST_TENANTS - 1, parse=list[str])
            for model in models
            for priority in CLASSES
        ]
        answers = iter(run_every(self._client, calls))
        return {model: [tenant for _ in CLASSES for tenant in next(answers)] for model in models}

    def _may_evict(self, tenants: dict[str, list[str]], models: int, now: int) -> dict[str, bool]:
        """By model, whether any of its tenants has not used up its share of a minute: of the models on demand, by the
        tenants that waited for one. Redis keeps what was, so that another agent goes on with it."""
        turns = run(self._client, farm.tenant_turns(now - farm.TENANT_TURNS_MS))
        waiting = {tenant for model_tenants in tenants.values() for tenant in model_tenants}
        noted = {turn.tenant for turn in turns if now - turn.at_ms < NOTE_TENANT_MS}
        notes = [farm.note_tenant(tenant, evicted=False) for tenant in sorted(waiting - noted)]
        if notes:
            run_every(self._client, [call for calls in notes for call in calls])
        share = max(1, models // max(1, len(waiting | {turn.tenant for turn in turns})))
        evictions = Counter(turn.tenant for turn in turns if turn.evicted)
        return {
            model: any(evictions[tenant] < share for tenant in model_tenants)
            for model, model_tenants in tenants.items()
        }

    def _write(self, changed: Mapping[str, Demand], models: Mapping[str, ModelOnDemand], woken: WakePlan) -> None:
        if changed:
            run_every(self._client, [farm.put_demand(name, demand) for name, demand in changed.items()])
        for name, demand in changed.items():
            before = models[name].demand.replicas
            if name in woken.demands and demand.replicas > before:
                gave_way = woken.gave_way[name]
                log.info("model woken", model=name, gave_way=gave_way, action="model_wake")
            elif demand.replicas == 0 and before:
                log.info("model sleeps", model=name, action="model_sleep")
        for name, why in woken.hopeless.items():
            ended = abandon(self._client, name, f"model '{name}' can't be placed: {why}", "finished")
            if ended:
                log.error("a model can't be placed", model=name, ended_requests=ended, error=why, action="model_wake")

    def _note(self) -> None:
        if time.monotonic() - self._noted > NOTE_EVERY_S:
            run(self._client, farm.note_on_demand())
            self._noted = time.monotonic()


def _replicas_by_model(view: FarmView) -> dict[str, dict[str, Parts]]:
    """The parts of each model's replicas, without those that leave."""
    replicas: dict[str, dict[str, Parts]] = {}
    for host, assignments in view.by_host.items():
        for assignment in assignments:
            if not assignment.withdrawn:
                replicas.setdefault(assignment.spec.name, {}).setdefault(assignment.replica, {})[host] = assignment
    return replicas


def _traffic(load: ModelLoad, overview: Overview | None, is_called: bool) -> Traffic:
    """`overview`: None for a model without a replica. A call of a model that sleeps counts as a request that waits."""
    replicas = overview.replicas if overview is not None else []
    leaders = [replica.beats[0] for replica in replicas if replica.beats]
    return Traffic(
        queued=load.queued + is_called,
        running=sum(beat.running for beat in leaders if beat is not None),
        enqueued=load.enqueued,
        expected_wait_ms=load.expected_wait_ms,
        serving=sum(replica.state == "loaded" for replica in replicas),
        failed=bool(replicas) and all(replica.state == "failed" and replica.placed for replica in replicas),
    )
