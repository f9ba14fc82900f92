"""Placement is a pure function: what it answers for each state of the farm."""

from __future__ import annotations

from control.messages import Assignment, ModelSpec
from control.placement import Assign, Host, Unplaceable, Withdraw, plan

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


def test_a_new_revision_replaces_the_old_one_once_it_is_gone() -> None:
    """The old revision is withdrawn; the new one waits until its host has let go of it."""
    old, new = spec(), spec(revision=2, dtype="float64")
    assert plan([new], [CPU], {"a": [holding(old)]}) == [Withdraw("a", "m", "r0")]
    assert plan([new], [CPU], {"a": []}) == [Assign("a", holding(new))]


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
