"""The number of replicas of a model on demand, by its requests, and the choice of the model that gives way to another
where memory or devices are short. Data in, data out; all times are ms of the Redis server's clock.

A model on demand has `min_replicas` below `replicas` in its specification. With `min_replicas` 0 it sleeps while it has
no requests. The first request wakes it, and waits in its queue meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from control.messages import Assignment, ModelSpec
from control.placement.give_back import Uses, with_lent
from control.placement.placement import Host, Needs, Parts, Room, Unplaceable, place, replica_count
from control.placement.rollout import in_order

SHORT_MS = 10_000
"""One more replica runs after the expected wait was above the target for so long."""
SPARE_MS = 300_000
"""One replica fewer runs after no request waited for so long."""
FAILED_MS = 10_000
"""A model whose replicas all failed, and that has no requests, sleeps after so long: the next request tries again."""
STAY_MS = 30_000
"""The least stay of a model that is in use, once it is loaded; twice the time of its load, if that is longer."""
UNKNOWN_LOAD_MS = 5_000
"""The time of a load before there was one."""
LONGEST_WAIT_MS = 118_500
"""A model that is in use gives way in time for the requests of another to wait no longer than this."""
PAUSES = 6
"""A model is in use until its last request is so many of its usual pauses ago, or its least stay."""
LEAST_PAUSE_MS = 250
LONG_PAUSE_MS = 12_000
"""A model whose usual pause is longer is not in use between two requests: another one has time in a pause."""
USED_EVERY_MS = 1_000
"""A use is noted so often: each note is a write to Redis."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The times and counts of one model's requests, and the number of replicas that follows from them. 0 as a time:
    never."""

    replicas: int
    revision: int = 0
    """Of the specification whose assets are published, or whose replicas publish them."""
    changed: int = 0
    """The time at which `replicas` was changed last."""
    loaded: int = 0
    """The time at which the first replica served after a wake."""
    load_ms: int = 0
    """From the last wake to `loaded`."""
    used: int = 0
    """The last time at which the model had a request."""
    requested: int = 0
    """The time at which the last request came."""
    pause_ms: int = 0
    """The usual time between two requests; 0 before the second."""
    enqueued: int = 0
    """Its count of requests then."""
    waiting: int = 0
    """Since when requests wait while no replica is to run."""
    short: int = 0
    """Since when the expected wait is above the target."""
    spare: int = 0
    """Since when no request waits."""
    failed: int = 0
    """Since when all replicas have failed."""
    detail: str = ""
    """The reason why the model is not woken, where requests wait for it."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of one model now. `serving` counts its replicas that serve; `failed`: all that there are were given
    up."""

    queued: int = 0
    running: int = 0
    enqueued: int = 0
    expected_wait_ms: int | None = None
    serving: int = 0
    failed: bool = False

    @property
    def open(self) -> bool:
        """True if there is any request."""
        return self.queued > 0 or self.running > 0


@dataclass(frozen=True, slots=True)
class ModelOnDemand:
    """A model, what is known of its requests, and its replicas by name, with their parts; without those that leave."""

    spec: ModelSpec
    demand: Demand
    traffic: Traffic
    replicas: Mapping[str, Parts] = field(default_factory=dict[str, Parts])

    @property
    def spare_replicas(self) -> list[str]:
        """Those that may go, the ones that came last first."""
        names = in_order(self.replicas)
        return names[self.spec.least_replicas :][::-1]


def follow(spec: ModelSpec, before: Demand, traffic: Traffic, now: int) -> Demand:
    """The demand after a look at the requests. A model that sleeps is not woken here: `WakePlanner` does that."""
    after = _noted(spec, before, traffic, now)
    replicas = min(max(after.replicas, spec.least_replicas), spec.replicas)
    if after.short and now - after.short >= SHORT_MS and replicas < spec.replicas:
        replicas += 1
    elif replicas > max(1, spec.least_replicas) and after.spare and now - after.spare >= SPARE_MS:
        replicas -= 1
    elif replicas == 1 and spec.least_replicas == 0 and not traffic.open:
        idle = now - max(after.used, after.loaded, after.changed) >= spec.idle_s * 1000
        if idle or (after.failed and now - after.failed >= FAILED_MS):
            replicas = 0
    return with_replicas(after, replicas, now)


def _noted(spec: ModelSpec, before: Demand, traffic: Traffic, now: int) -> Demand:
    """With the times that follow from what is seen."""
    came = traffic.enqueued - before.enqueued if before.requested else int(traffic.open)
    pause_ms = before.pause_ms
    used = before.used
    if came > 0 and before.requested:
        interval_ms = max(1, (now - before.requested) // came)
        pause_ms = (7 * pause_ms + interval_ms) // 8 if pause_ms else interval_ms
    if came > 0 or (traffic.open and now - used >= USED_EVERY_MS):
        used = now
    awake = before.replicas > 0
    loaded = before.loaded or (now if awake and traffic.serving else 0)
    wait_ms = traffic.expected_wait_ms
    late = traffic.queued > 0 and (wait_ms is None or wait_ms > spec.target_wait_s * 1000)
    return msgspec.structs.replace(
        before,
        used=used,
        requested=now if came > 0 else before.requested,
        pause_ms=pause_ms,
        enqueued=traffic.enqueued,
        loaded=loaded,
        load_ms=loaded - before.changed if loaded and not before.loaded else before.load_ms,
        waiting=(before.waiting or now) if traffic.queued and not awake else 0,
        short=(before.short or now) if late and 0 < before.replicas <= traffic.serving else 0,
        spare=0 if traffic.queued else before.spare or now,
        failed=(before.failed or now) if traffic.failed and awake else 0,
    )


def with_replicas(demand: Demand, replicas: int, now: int) -> Demand:
    """The same demand with so many replicas from now on."""
    if replicas == demand.replicas:
        return demand
    woken = demand.replicas == 0
    return msgspec.structs.replace(
        demand,
        replicas=replicas,
        changed=now,
        short=0,
        spare=now,
        failed=0,
        waiting=0,
        detail="",
        loaded=0 if woken or not replicas else demand.loaded,
    )


def in_use(model: ModelOnDemand, now: int) -> bool:
    """True if another request of the model is to be expected soon, or is there."""
    pause_ms = model.demand.pause_ms if model.demand.pause_ms < LONG_PAUSE_MS else 0
    quiet_ms = min(STAY_MS, PAUSES * max(pause_ms, LEAST_PAUSE_MS))
    return model.traffic.open or now - model.demand.used < quiet_ms


@dataclass(frozen=True, slots=True)
class WakePlan:
    """The decisions of one turn: the demands that change, and of each model that can't be woken now the reason. Those
    of `hopeless` could not be placed if all models on demand slept."""

    demands: dict[str, Demand] = field(default_factory=dict[str, Demand])
    waits: dict[str, str] = field(default_factory=dict[str, str])
    hopeless: dict[str, str] = field(default_factory=dict[str, str])
    gave_way: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """By model that is woken, the models that go to sleep for it."""


class WakePlanner:
    """Decides which of the models that sleep and have requests are woken, and which models go to sleep for them.

    The model whose requests wait longest is first. It takes what is free. Where that is too little, models that are not
    in use go to sleep, the least recently used one first; then, once it would wait too long, those that are in use and
    had their least stay. What these run is finished first.
    """

    def __init__(self, models: Sequence[ModelOnDemand], room: Room, emptied: Room, now: int) -> None:
        """`room`: what is left beside all replicas that don't leave and those that are still to come; `emptied`: what
        there would be if all models on demand slept."""
        self._models = {model.spec.name: model for model in models}
        self._room = room
        self._emptied = emptied
        self._now = now
        self._sleepers = sorted(
            (one for one in models if one.demand.replicas == 0 and one.traffic.queued and not one.spec.paused),
            key=lambda model: (model.demand.waiting, model.spec.name),
        )
        self._plan = WakePlan()

    def wake(self, may_evict: Mapping[str, bool]) -> WakePlan:
        """`may_evict`: by model, whether its tenants may have others give way now."""
        for model in self._sleepers:
            name = model.spec.name
            if self._fits(model, self._room):
                self._take(model, [])
                continue
            victims = self._victims(model) if may_evict.get(name, True) else []
            if victims:
                self._take(model, victims)
            elif not self._fits(model, self._emptied):
                self._plan.hopeless[name] = self._refusal(model)
            else:
                self._plan.waits[name] = "waits for memory that other models use"
        return self._plan

    def _fits(self, model: ModelOnDemand, room: Room) -> bool:
        actions = place(model.spec, "new", {}, room.without({}))
        return not any(isinstance(action, Unplaceable) for action in actions)

    def _refusal(self, model: ModelOnDemand) -> str:
        actions = place(model.spec, "new", {}, self._emptied.without({}))
        return next((action.why for action in actions if isinstance(action, Unplaceable)), "")

    def _take(self, model: ModelOnDemand, victims: list[ModelOnDemand]) -> None:
        """Wake the model, in the room of the victims."""
        self._room = self._without(victims)
        place(model.spec, "new", {}, self._room)
        for victim in victims:
            self._sleep(victim)
        self._plan.demands[model.spec.name] = with_replicas(model.demand, 1, self._now)
        self._plan.gave_way[model.spec.name] = [victim.spec.name for victim in victims]

    def _sleep(self, victim: ModelOnDemand) -> None:
        name = victim.spec.name
        demand = self._plan.demands.get(name, victim.demand)
        self._plan.demands[name] = with_replicas(demand, victim.spec.least_replicas, self._now)
        del self._models[name]

    def _without(self, victims: Iterable[ModelOnDemand]) -> Room:
        """The room without the replicas of these models beyond their least number."""
        room = self._room
        for victim in victims:
            for name in victim.spare_replicas:
                room = room.without(victim.replicas[name])
        return room

    def _victims(self, model: ModelOnDemand) -> list[ModelOnDemand]:
        """Those that have to sleep for the model, empty where too few may."""
        chosen = list[ModelOnDemand]()
        for victim in self._may_go(model):
            chosen.append(victim)
            if self._fits(model, self._without(chosen)):
                break
        else:
            return []
        for victim in chosen[:-1]:  # on another host, or small: it would sleep for nothing
            fewer = [one for one in chosen if one is not victim]
            if self._fits(model, self._without(fewer)):
                chosen = fewer
        return chosen

    def _may_go(self, sleeper: ModelOnDemand) -> Iterator[ModelOnDemand]:
        awake = [model for model in self._models.values() if model.spare_replicas and model is not sleeper]
        late = self._now >= self._latest()
        for model in sorted(awake, key=lambda one: (in_use(one, self._now), one.demand.used, one.spec.name)):
            demand = model.demand
            loads = 2 * demand.load_ms
            stayed = self._now - demand.loaded if demand.loaded else 0
            idle = not in_use(model, self._now) and stayed >= min(STAY_MS, loads)
            due = late and stayed >= max(STAY_MS, loads)
            if demand.failed or (demand.loaded and (idle or due)):
                yield model

    def _latest(self) -> int:
        """The time at which the first of the sleepers has to be woken so that none of them waits longer than
        LONGEST_WAIT_MS, if they take turns in one room."""
        loads = [model.demand.load_ms for model in self._models.values() if model.demand.load_ms]
        latest = list[int]()
        before = 0
        for model in self._sleepers:
            load_ms = model.demand.load_ms or max(loads, default=UNKNOWN_LOAD_MS)
            before += load_ms
            latest.append(model.demand.waiting + LONGEST_WAIT_MS - before)
            before += max(STAY_MS, 2 * load_ms)
        return min(latest, default=self._now)


def rooms_for_waking(
    hosts: Sequence[Host],
    needs: Needs,
    by_host: Mapping[str, Sequence[Assignment]],
    specs: Iterable[ModelSpec],
    models: Iterable[ModelOnDemand],
    uses: Uses | None = None,
) -> tuple[Room, Room]:
    """The two rooms of a `WakePlanner`, with the KV memory that replicas can give back by their `uses`.

    `specs`: all that are desired; their missing replicas are placed first.
    """
    by_host = with_lent(by_host, needs, uses or {})
    spare = {(model.spec.name, replica) for model in models for replica in model.spare_replicas}
    demands = {model.spec.name: model.demand.replicas for model in models}
    counts = Counter(one.spec.name for one in {one.place: one for one in _staying(by_host)}.values())
    rooms = Room(hosts, needs), Room(hosts, needs)
    for room, is_emptied in zip(rooms, (False, True), strict=True):
        for host_id, assignments in by_host.items():
            for one in assignments:
                if not one.withdrawn and not (is_emptied and one.place in spare):
                    room.take(host_id, one)
        for spec in specs:
            count = spec.least_replicas if is_emptied else replica_count(spec, demands)
            for _ in range(0 if spec.unload else count - counts[spec.name]):
                place(spec, "missing", {}, room)
    return rooms


def _staying(by_host: Mapping[str, Sequence[Assignment]]) -> Iterator[Assignment]:
    return (assignment for assignments in by_host.values() for assignment in assignments if not assignment.withdrawn)
