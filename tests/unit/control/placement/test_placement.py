"""Placement is a pure function: what it answers for each state of the farm."""

from __future__ import annotations

from control.messages import Assignment, ModelSpec
from control.placement.need import ModelNeed, RankNeed
from control.placement.placement import Assign, Host, Unplaceable, Withdraw
from control.placement.rollout import plan

CPU = Host("a")
GPUS = Host("g", ("cuda:0", "cuda:1"))


def spec(name: str = "m", **fields: object) -> ModelSpec:
    return ModelSpec(name=name, source="/models/m", **fields)  # type: ignore[arg-type]


def holding(model: ModelSpec, replica: str = "r0", devices: list[str] | None = None) -> Assignment:
    return Assignment(spec=model, replica=replica, ranks=list(range(model.tp)), devices=devices or ["cpu"] * model.tp)


def test_a_desired_model_is_assigned() -> None:
    """A model that runs nowhere goes to a living host, one device per rank."""
    model = spec(tp=2)
    assert plan([model], [CPU], {}) == [Assign("a", holding(model))]


def test_nothing_to_do_when_desired_is_actual() -> None:
    """A plan applied needs no further plan."""
    model = spec(tp=2)
    assert plan([model], [CPU], {"a": [holding(model)]}) == []


def test_replicas_spread_over_hosts() -> None:
    """Two replicas go to the two hosts that have fewest."""
    model = spec(replicas=2)
    actions = plan([model], [Host("a"), Host("b")], {})
    assert [(a.host, a.assignment.replica) for a in actions if isinstance(a, Assign)] == [("a", "r0"), ("b", "r1")]


def test_a_dead_host_loses_its_replica_to_another() -> None:
    """Heartbeats lapsed: the assignment is taken away and given to a host that lives."""
    model = spec()
    actions = plan([model], [Host("b")], {"a": [holding(model)]})
    assert actions == [Withdraw("a", "m", "r0"), Assign("b", holding(model))]


def test_only_a_tombstone_unloads() -> None:
    """A missing spec changes nothing; a tombstone withdraws."""
    model = spec()
    assert plan([], [CPU], {"a": [holding(model)]}) == []
    assert plan([spec(unload=True)], [CPU], {"a": [holding(model)]}) == [Withdraw("a", "m", "r0")]


def test_accelerators_are_used_where_there_are_any_and_never_replaced_by_the_cpu() -> None:
    """A spec without devices takes free GPUs of a GPU host, and is unplaceable there once they are taken."""
    first, second = spec("m", tp=2), spec("n", tp=1)
    assert plan([first], [GPUS], {}) == [Assign("g", holding(first, devices=["cuda:0", "cuda:1"]))]
    actions = plan([first, second], [GPUS], {"g": [holding(first, devices=["cuda:0", "cuda:1"])]})
    assert len(actions) == 1 and isinstance(actions[0], Unplaceable)


def test_a_device_that_no_host_has_is_named() -> None:
    """The refusal says what was asked for and what there is."""
    [action] = plan([spec(devices=["cuda:7"])], [CPU, GPUS], {})
    assert isinstance(action, Unplaceable)
    assert "cuda:7" in action.why and "g has cuda:0, cuda:1" in action.why and "a has cpu only" in action.why


def test_no_living_host_is_said() -> None:
    """With no worker running the reason is that, not the devices."""
    [action] = plan([spec()], [], {})
    assert isinstance(action, Unplaceable) and "no host is alive" in action.why


def parts(actions: list[object]) -> dict[str, list[tuple[int, str]]]:
    """Which ranks go to which host, with their devices."""
    assert all(isinstance(action, Assign) for action in actions), actions
    return {a.host: list(zip(a.assignment.ranks, a.assignment.devices, strict=True)) for a in actions}  # type: ignore[attr-defined]


def part(model: ModelSpec, ranks: list[int], device: str = "cpu") -> Assignment:
    return Assignment(spec=model, replica="r0", ranks=ranks, devices=[device] * len(ranks))


def test_ranks_are_split_only_where_no_host_has_the_devices() -> None:
    """One host that is large enough is preferred to two; else as few as will do."""
    small, large = Host("a", ("cuda:0",)), Host("b", ("cuda:0", "cuda:1"))
    assert parts(plan([spec(tp=2)], [small, large], {})) == {"b": [(0, "cuda:0"), (1, "cuda:1")]}
    split = parts(plan([spec(tp=3)], [small, large], {}))
    assert split == {"b": [(0, "cuda:0"), (1, "cuda:1")], "a": [(2, "cuda:0")]}
    [action] = plan([spec(tp=4)], [small, large], {})
    assert isinstance(action, Unplaceable) and "4 devices of one kind" in action.why


def test_named_devices_may_be_on_several_hosts() -> None:
    """Each rank has the device that was named for it."""
    hosts = [Host("a", ("cuda:0",)), Host("b", ("cuda:1",))]
    split = parts(plan([spec(tp=2, devices=["cuda:1", "cuda:0"])], hosts, {}))
    assert split == {"a": [(1, "cuda:0")], "b": [(0, "cuda:1")]}


def test_a_spread_model_uses_all_hosts_evenly() -> None:
    """When asked: no host has more than its share, though one could hold them all."""
    model = spec(tp=3, spread=True)
    assert parts(plan([model], [Host("a"), Host("b")], {})) == {"a": [(0, "cpu"), (1, "cpu")], "b": [(2, "cpu")]}
    assert parts(plan([model], [Host("a")], {})) == {"a": [(0, "cpu"), (1, "cpu"), (2, "cpu")]}
    assert plan([model], [Host("a"), Host("b")], {"a": [part(model, [0, 1])], "b": [part(model, [2])]}) == []


def test_a_spread_group_is_of_one_kind_and_as_even_as_the_devices_allow() -> None:
    """A host without GPUs gets none of its ranks, and a small one no more than it has."""
    small, large, plain = Host("a", ("cuda:0",)), Host("b", ("cuda:0", "cuda:1", "cuda:2")), Host("c")
    ranks_by_host = parts(plan([spec(tp=4, spread=True)], [small, large, plain], {}))
    assert {host: len(ranks) for host, ranks in ranks_by_host.items()} == {"a": 1, "b": 3}
    assert {device for ranks in ranks_by_host.values() for _, device in ranks} == {"cuda:0", "cuda:1", "cuda:2"}
    ranks_by_host = parts(plan([spec(tp=2, spread=True)], [small, large, plain], {}))
    assert {host: len(ranks) for host, ranks in ranks_by_host.items()} == {"a": 1, "b": 1}


def test_the_ranks_of_a_lost_host_join_those_that_live() -> None:
    """Survivors keep their processes and weights: their host gets the others too."""
    model = spec(tp=2, spread=True)
    held = {"a": [part(model, [0])], "b": [part(model, [1])]}
    assert plan([model], [Host("a")], held) == [Withdraw("b", "m", "r0"), Assign("a", part(model, [0, 1]))]


def test_a_host_that_comes_back_gives_up_ranks_that_another_has() -> None:
    """It was thought dead and says again what it runs: one of the two has to let go, and nothing else moves."""
    model = spec(tp=2, spread=True)
    held = {"a": [part(model, [0, 1])], "b": [part(model, [1])]}
    assert plan([model], [Host("a"), Host("b")], held) == [Withdraw("b", "m", "r0", at_once=True)]


def test_a_model_on_an_external_engine_goes_to_a_host_that_offers_it() -> None:
    """The engine has all devices, and they are on one host."""
    model = spec(engine="vllm", tp=2)
    offers = Host("e", ("cuda:0", "cuda:1"), engines=("vllm",))
    [assigned] = plan([model], [Host("a", ("cuda:0", "cuda:1")), offers], {})
    assert isinstance(assigned, Assign)
    assert (assigned.host, assigned.assignment.devices) == ("e", ["cuda:0", "cuda:1"])


def test_an_engine_that_no_host_offers_is_named_with_the_remedy() -> None:
    [refused] = plan([spec(engine="vllm")], [CPU], {})
    assert isinstance(refused, Unplaceable)
    assert "engine vllm" in refused.why and "--engine-python vllm=" in refused.why


def test_the_memory_of_an_engine_is_planned_as_its_operator_gave_it() -> None:
    """It has no tokens of KV memory that the planner would share out."""
    model = spec(engine="llama-server")
    need = ModelNeed(revision=1, context=0, ranks=[RankNeed(weights=600, kv=0, step=0, process=0)])
    small, large = Host("a", memory=500, engines=("llama-server",)), Host("b", memory=900, engines=("llama-server",))
    [assigned] = plan([model], [small, large], {}, needs={"m": need})
    assert isinstance(assigned, Assign)
    assert (assigned.host, assigned.assignment.memory, assigned.assignment.kv_tokens) == ("b", [600], None)
    [refused] = plan([model], [small], {}, needs={"m": need})
    assert isinstance(refused, Unplaceable) and "memory" in refused.why
