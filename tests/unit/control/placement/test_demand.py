"""Replicas on demand: by requests alone, and by turns where memory is short."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import pytest

from control.messages import Assignment, ModelSpec
from control.placement.demand import (
    FAILED_MS,
    LONGEST_WAIT_MS,
    SHORT_MS,
    SPARE_MS,
    STAY_MS,
    Demand,
    ModelOnDemand,
    Traffic,
    WakePlan,
    WakePlanner,
    follow,
    in_use,
    rooms_for_waking,
    with_replicas,
)
from control.placement.need import ModelNeed, RankNeed
from control.placement.placement import Host
from ops.bench.load.turns import fewest_switches

GIB = 2**30
NOW = 1_000_000


def spec(name: str = "m", **fields: Any) -> ModelSpec:
    every: dict[str, Any] = {"replicas": 1, "min_replicas": 0} | fields
    return ModelSpec(name=name, source=f"/models/{name}", **every)


def need(gib: float) -> ModelNeed:
    rank = RankNeed(weights=int(gib * GIB), kv=0, step=0, process=0, bytes_per_token=0)
    return ModelNeed(revision=1, context=512, ranks=[rank])


def awake(**fields: Any) -> Demand:
    every: dict[str, Any] = {"replicas": 1, "changed": NOW - 90_000, "loaded": NOW - 88_000, "load_ms": 2_000} | fields
    return Demand(**every)


# --- one model --------------------------------------------------------------------------------------------------------


def test_a_model_sleeps_once_it_is_idle_and_not_before() -> None:
    model = spec(idle_s=60)
    used = awake(used=NOW)
    assert follow(model, used, Traffic(serving=1), NOW + 59_000).replicas == 1
    assert follow(model, used, Traffic(serving=1), NOW + 60_000).replicas == 0
    assert follow(model, used, Traffic(serving=1, running=1), NOW + 60_000).replicas == 1
    assert follow(model, used, Traffic(serving=1, queued=1, enqueued=1), NOW + 60_000).replicas == 1
    assert follow(spec(idle_s=60, min_replicas=1, replicas=2), used, Traffic(serving=1), NOW + 600_000).replicas == 1


def test_one_that_has_just_been_woken_does_not_sleep_at_once() -> None:
    """Its last use is long ago, and its request may have been cancelled."""
    woken = with_replicas(Demand(replicas=0, used=1), 1, NOW)
    assert follow(spec(idle_s=60), woken, Traffic(serving=1), NOW + 1000).replicas == 1


def test_more_run_while_requests_would_wait_too_long() -> None:
    model, demand = spec(replicas=3, min_replicas=1, target_wait_s=2.0), awake(used=NOW)
    late = Traffic(queued=9, enqueued=9, running=4, serving=1, expected_wait_ms=2_500)
    seen = follow(model, demand, late, NOW)
    assert seen.replicas == 1 and seen.short == NOW
    assert follow(model, seen, late, NOW + SHORT_MS - 1).replicas == 1
    more = follow(model, seen, late, NOW + SHORT_MS)
    assert more.replicas == 2 and more.short == 0
    still = follow(model, more, late, NOW + 3 * SHORT_MS)
    assert still.replicas == 2 and not still.short, "the second is being loaded, and counts first"
    in_time = dataclasses.replace(late, expected_wait_ms=1_500)
    assert follow(model, seen, in_time, NOW + SHORT_MS).short == 0


def test_fewer_run_once_nothing_waits() -> None:
    model, demand = spec(replicas=3, min_replicas=1), awake(replicas=3, used=NOW, spare=NOW)
    calm = Traffic(running=1, serving=3)
    assert follow(model, demand, calm, NOW + SPARE_MS - 1).replicas == 3
    fewer = follow(model, demand, calm, NOW + SPARE_MS)
    assert fewer.replicas == 2 and follow(model, fewer, calm, NOW + SPARE_MS + 1).replicas == 2
    waits = Traffic(running=1, serving=3, queued=1, expected_wait_ms=1)
    assert follow(model, demand, waits, NOW + SPARE_MS).spare == 0


def test_a_model_that_failed_sleeps_so_that_its_next_request_tries_again() -> None:
    failed = follow(spec(), awake(loaded=0, used=NOW), Traffic(failed=True), NOW)
    assert failed.failed == NOW and failed.replicas == 1
    assert follow(spec(), failed, Traffic(failed=True), NOW + FAILED_MS).replicas == 0
    waits = Traffic(failed=True, queued=1, enqueued=1)
    assert follow(spec(), failed, waits, NOW + FAILED_MS).replicas == 1


def test_other_bounds_are_followed() -> None:
    assert follow(spec(replicas=2, min_replicas=1), Demand(replicas=0), Traffic(), NOW).replicas == 1
    assert follow(spec(replicas=1), awake(replicas=4, used=NOW), Traffic(), NOW).replicas == 1


def test_the_usual_pause_between_requests_is_learned() -> None:
    demand, now = Demand(replicas=1, loaded=1, requested=NOW), NOW + 6_000
    for count in range(1, 40):
        demand = follow(spec(), demand, Traffic(serving=1, enqueued=count), now)
        now += 6_000
    assert 5_500 <= demand.pause_ms <= 6_500
    assert in_use(ModelOnDemand(spec(), demand, Traffic()), demand.used + 25_000)
    assert not in_use(ModelOnDemand(spec(), demand, Traffic()), demand.used + 30_000)
    assert not in_use(ModelOnDemand(spec(), Demand(replicas=1, used=NOW, pause_ms=20_000), Traffic()), NOW + 3_000)
    assert not in_use(ModelOnDemand(spec(), Demand(replicas=1, used=NOW), Traffic()), NOW + 3_000), "one request"


# --- turns ------------------------------------------------------------------------------------------------------------


class Host1:
    """One host, and its models."""

    def __init__(self, gib: float) -> None:
        self.hosts = [Host("h", memory=int(gib * GIB))]
        self.models: dict[str, ModelOnDemand] = {}
        self.needs: dict[str, ModelNeed] = {}
        self.held: dict[str, list[Assignment]] = {"h": []}

    def add(self, name: str, gib: float, demand: Demand, traffic: Traffic | None = None, **fields: Any) -> None:
        self.needs[name], model_spec = need(gib), spec(name, **fields)
        parts = {}
        if demand.replicas:
            one = Assignment(spec=model_spec, replica="r0", ranks=[0], devices=["cpu"], memory=[int(gib * GIB)])
            self.held["h"].append(one)
            parts = {"r0": {"h": one}}
        self.models[name] = ModelOnDemand(model_spec, demand, traffic or Traffic(), parts)

    def wake(self, now: int = NOW, may_evict: Mapping[str, bool] | None = None) -> WakePlan:
        models = list(self.models.values())
        rooms = rooms_for_waking(self.hosts, self.needs, self.held, [model.spec for model in models], models)
        return WakePlanner(models, *rooms, now).wake(may_evict or {})


CALLED = Traffic(queued=1, enqueued=1)


def asleep(waiting: int = NOW) -> Demand:
    return Demand(replicas=0, waiting=waiting, load_ms=2_000)


def test_what_is_free_is_taken_and_nobody_gives_way() -> None:
    host = Host1(4)
    host.add("idle", 2, awake(used=1))
    host.add("called", 2, asleep(), CALLED)
    assert host.wake().gave_way == {"called": []}


def test_the_least_recently_used_one_gives_way_and_no_other() -> None:
    host = Host1(6)
    host.add("old", 2, awake(used=NOW - 70_000))
    host.add("older", 2, awake(used=NOW - 80_000))
    host.add("busy", 2, awake(used=NOW), Traffic(running=1))
    host.add("called", 2, asleep(), CALLED)
    woken = host.wake()
    assert woken.gave_way == {"called": ["older"]}
    assert woken.demands["older"].replicas == 0 and woken.demands["called"].replicas == 1


def test_as_many_give_way_as_are_needed() -> None:
    host = Host1(6)
    for index in range(3):
        host.add(f"m{index}", 2, awake(used=NOW - 80_000 + index))
    host.add("large", 4, asleep(), CALLED)
    assert host.wake().gave_way == {"large": ["m0", "m1"]}


def test_a_small_one_does_not_sleep_for_nothing() -> None:
    host = Host1(5)
    host.add("small", 1, awake(used=NOW - 80_000))
    host.add("big", 4, awake(used=NOW - 70_000))
    host.add("called", 4, asleep(), CALLED)
    assert host.wake().gave_way == {"called": ["big"]}


def test_one_in_use_stays_until_the_others_have_waited_long() -> None:
    host = Host1(2)
    host.add("busy", 2, awake(used=NOW, loaded=NOW - 10 * STAY_MS), Traffic(running=1))
    host.add("called", 2, asleep(), CALLED)
    woken = host.wake()
    assert not woken.demands and "called" in woken.waits
    assert host.wake(NOW + LONGEST_WAIT_MS - 2_001).waits
    assert host.wake(NOW + LONGEST_WAIT_MS - 2_000).gave_way == {"called": ["busy"]}


def test_one_that_is_loaded_or_has_just_come_stays() -> None:
    for demand in (awake(loaded=0), awake(loaded=NOW + LONGEST_WAIT_MS - STAY_MS + 1, used=NOW)):
        host = Host1(2)
        host.add("new", 2, demand, Traffic(queued=3))
        host.add("called", 2, asleep(), CALLED)
        assert host.wake(NOW + LONGEST_WAIT_MS).waits
    host = Host1(2)
    host.add("slow", 2, awake(load_ms=60_000, loaded=NOW - STAY_MS, used=NOW), Traffic(queued=3))
    host.add("called", 2, asleep(NOW - 2 * LONGEST_WAIT_MS), CALLED)
    assert host.wake().waits, "two loads take longer than the least stay"


def test_a_model_that_can_never_be_placed_is_named() -> None:
    host = Host1(2)
    host.add("other", 1, awake(used=1))
    host.add("huge", 3, asleep(), CALLED)
    woken = host.wake()
    assert not woken.demands and "3 GiB" in woken.hopeless["huge"] and "2 GiB" in woken.hopeless["huge"]


def test_a_model_that_must_run_never_gives_way() -> None:
    host = Host1(2)
    host.add("least", 2, awake(used=1), min_replicas=1, replicas=2)
    host.add("called", 2, asleep(), CALLED)
    assert "called" in host.wake().hopeless


def test_the_one_whose_requests_wait_longest_is_first() -> None:
    host = Host1(2)
    host.add("late", 2, asleep(NOW - 5_000), CALLED)
    host.add("later", 2, asleep(NOW - 9_000), CALLED)
    woken = host.wake()
    assert woken.gave_way == {"later": []} and "late" in woken.waits


def test_one_that_is_still_to_come_makes_no_other_hopeless() -> None:
    """It was woken, and the model that gave way has not left yet."""
    host = Host1(2)
    host.add("coming", 2, Demand(replicas=1, changed=NOW))
    host.held["h"].clear()
    host.models["coming"] = dataclasses.replace(host.models["coming"], replicas={})
    host.add("called", 2, asleep(), CALLED)
    woken = host.wake()
    assert not woken.hopeless and "called" in woken.waits and not woken.demands


def test_a_tenant_beyond_its_share_evicts_nobody() -> None:
    host = Host1(2)
    host.add("idle", 2, awake(used=1))
    host.add("called", 2, asleep(), CALLED)
    assert host.wake(may_evict={"called": False}).waits
    assert host.wake(may_evict={"called": True}).gave_way


def test_a_paused_model_is_not_woken() -> None:
    host = Host1(2)
    host.add("called", 2, asleep(), CALLED, paused=True)
    assert host.wake() == WakePlan()


# --- against the best schedule ----------------------------------------------------------------------------------------


class Play:
    """Models that take turns in one room, by the second."""

    def __init__(self, arrivals: list[list[float]], load_s: float) -> None:
        self.arrivals, self.load_s = arrivals, load_s
        self.demands = [Demand(replicas=0) for _ in arrivals]
        self.served = [0] * len(arrivals)
        self.ready: dict[int, float] = {}
        """Models that have the room, and when they are loaded."""
        self.switches, self.waits = 0, list[float]()

    def run(self, seconds: float) -> None:
        tick = 0.2
        for step in range(round(seconds / tick)):
            now = step * tick
            self.turn(now)
            for model, at in self.ready.items():
                while at <= now and self.served[model] < sum(one <= now for one in self.arrivals[model]):
                    self.waits.append(now - self.arrivals[model][self.served[model]])
                    self.served[model] += 1

    def turn(self, now: float) -> None:
        host, ms = Host1(2), NOW + round(now * 1000)
        for model, own in enumerate(self.arrivals):
            came = sum(one <= now for one in own)
            serving = int(self.ready.get(model, now + 1) <= now)
            traffic = Traffic(queued=came - self.served[model], enqueued=came, serving=serving)
            self.demands[model] = follow(spec(f"m{model}"), self.demands[model], traffic, ms)
            host.add(f"m{model}", 2, self.demands[model], traffic)
        for name, demand in host.wake(ms).demands.items():
            model = int(name[1:])
            self.demands[model] = demand
            if demand.replicas:
                self.ready[model] = now + self.load_s
                self.switches += 1
            else:
                del self.ready[model]


def test_turns_are_close_to_the_best_schedule() -> None:
    """Three models, 300 requests at random in ten minutes: a tenth more switches than who knows the future needs."""
    switches, fewest = 0, 0
    for seed in range(6):
        draw, load_s = random.Random(seed), 2.0
        arrivals: list[list[float]] = [[], [], []]
        for _ in range(300):
            arrivals[draw.randrange(3)].append(draw.uniform(0, 600))
        arrivals = [sorted(own) for own in arrivals]
        play = Play(arrivals, load_s)
        play.run(800)
        assert play.served == [len(own) for own in arrivals] and max(play.waits) <= 120
        switches += play.switches
        fewest += fewest_switches(arrivals, load_s, STAY_MS / 1000, 120.0)
    assert switches <= 1.1 * fewest, (switches, fewest)


def test_the_fewest_switches() -> None:
    assert fewest_switches([[0.0, 50.0]], 2, 30, 120) == 1
    assert fewest_switches([[0.0], [0.0]], 2, 30, 120) == 2
    assert fewest_switches([[0.0, 400.0], [200.0]], 2, 30, 120) == 3
    with pytest.raises(ValueError, match="no schedule"):
        fewest_switches([[0.0], [0.0], [0.0], [0.0], [0.0], [0.0]], 0, 30, 120)
