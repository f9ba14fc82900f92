"""No host is planned beyond its memory; and what fits is placed."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control.messages import Assignment, ModelSpec
from control.placement.need import LEAST_TOKENS, ModelNeed, RankNeed
from control.placement.placement import Action, Assign, Host, Unplaceable, Withdraw
from control.placement.rollout import Place, is_settled, plan

GIB = 2**30


def need(gib: float, tp: int = 1, revision: int = 1, per_token: int = 0, context: int = 512) -> ModelNeed:
    """Of a model whose ranks need so much each beside their KV memory."""
    rank = RankNeed(weights=int(gib * GIB), kv=0, step=0, process=0, bytes_per_token=per_token)
    return ModelNeed(revision=revision, context=context, ranks=[rank] * tp)


def spec(name: str, **fields: Any) -> ModelSpec:
    return ModelSpec(name=name, source=f"/models/{name}", **fields)


class Farm:
    """Assignments alone. `turn` carries a plan out; replicas serve and leave when a test says so."""

    def __init__(self, *hosts: Host) -> None:
        self.hosts = {host.id: host for host in hosts}
        self.specs: dict[str, ModelSpec] = {}
        self.needs: dict[str, ModelNeed] = {}
        self.held: dict[str, list[Assignment]] = {host.id: [] for host in hosts}
        self.serving: set[Place] = set()
        self.unplaced: dict[str, str] = {}

    def want(self, name: str, model_need: ModelNeed, **fields: Any) -> None:
        self.specs[name] = spec(name, tp=len(model_need.ranks), revision=model_need.revision, **fields)
        self.needs[name] = model_need

    def turn(self) -> list[Action]:
        self.unplaced = {}
        actions = plan(list(self.specs.values()), list(self.hosts.values()), self.held, self.serving, needs=self.needs)
        for action in actions:
            match action:
                case Assign(host, assignment):
                    name = assignment.spec.name, assignment.replica
                    others = [one for one in self.held[host] if (one.spec.name, one.replica) != name]
                    self.held[host] = [*others, assignment]
                case Withdraw(host, model, replica):
                    self.held[host] = [
                        msgspec.structs.replace(one, withdrawn=True)
                        if (one.spec.name, one.replica) == (model, replica)
                        else one
                        for one in self.held[host]
                    ]
                    self.serving.discard((model, replica))
                case Unplaceable(model, _, why):
                    self.unplaced[model] = why
        return actions

    def come_up(self) -> None:
        self.serving |= {(one.spec.name, one.replica) for one in self.all() if not one.withdrawn}

    def go(self) -> None:
        self.held = {host: [one for one in held if not one.withdrawn] for host, held in self.held.items()}
        self.serving &= {(one.spec.name, one.replica) for one in self.all()}

    def settle(self) -> None:
        for _ in range(60):
            before = {host: list(held) for host, held in self.held.items()}, set(self.serving)
            self.turn()
            self.assert_none_is_exceeded()
            self.come_up()
            self.go()
            if before == (self.held, self.serving):
                return
        raise AssertionError("it never settles")

    def all(self) -> list[Assignment]:
        return [one for held in self.held.values() for one in held]

    def used(self, host: str) -> int:
        return sum(sum(one.memory) for one in self.held[host])

    def assert_none_is_exceeded(self) -> None:
        for host in self.hosts.values():
            assert host.memory is None or self.used(host.id) <= host.memory, (host, self.held[host.id])


def test_a_second_model_goes_where_memory_is_left() -> None:
    farm = Farm(Host("a", memory=4 * GIB), Host("b", memory=4 * GIB))
    farm.want("first", need(3))
    farm.want("second", need(3))
    farm.want("third", need(1))
    farm.settle()
    assert sorted(farm.used(host) for host in ("a", "b")) == [3 * GIB, 4 * GIB]


def test_what_fits_nowhere_is_unplaced_with_the_figures() -> None:
    farm = Farm(Host("a", memory=4 * GIB), Host("b", memory=2 * GIB))
    farm.want("first", need(3))
    farm.want("second", need(2.5))
    farm.settle()
    assert farm.unplaced == {
        "second": "it needs 2.5 GiB of memory; a has 1 GiB; b has 2 GiB left. `furrow models plan` shows what fits: "
        "--quant, fewer --kv-tokens, or more hosts"
    }
    assert [one.spec.name for one in farm.all()] == ["first"]


def test_ranks_go_to_several_hosts_where_one_has_too_little() -> None:
    farm = Farm(Host("a", memory=4 * GIB), Host("b", memory=4 * GIB))
    farm.want("m", need(3, tp=2))
    farm.settle()
    assert {host: farm.used(host) for host in ("a", "b")} == {"a": 3 * GIB, "b": 3 * GIB}


def test_a_change_without_memory_for_both_is_made_in_place() -> None:
    """The old replica goes first; its memory counts until its ranks have ended."""
    farm = Farm(Host("a", memory=4 * GIB))
    farm.want("m", need(3))
    farm.settle()
    farm.want("m", need(3, revision=2))
    farm.turn()
    assert [one.withdrawn for one in farm.all()] == [True]
    farm.turn()
    assert len(farm.all()) == 1
    farm.settle()
    assert [one.spec.revision for one in farm.all()] == [2]


def test_a_change_with_memory_for_both_serves_before_the_old_one_goes() -> None:
    farm = Farm(Host("a", memory=6 * GIB))
    farm.want("m", need(3))
    farm.settle()
    farm.want("m", need(3, revision=2))
    farm.turn()
    assert [(one.spec.revision, one.withdrawn) for one in farm.all()] == [(1, False), (2, False)]
    farm.settle()


def test_the_ranks_of_a_lost_host_wait_for_memory() -> None:
    """A takeover exceeds no host either."""
    farm = Farm(Host("a", memory=4 * GIB), Host("b", memory=4 * GIB))
    farm.want("first", need(3))
    farm.want("second", need(3))
    farm.settle()
    [lost] = [one.spec.name for one in farm.held["a"]]
    del farm.hosts["a"]
    actions = farm.turn()
    assert any(isinstance(one, Withdraw) and one.model == lost for one in actions)
    assert lost in farm.unplaced
    farm.hosts["c"] = Host("c", memory=3 * GIB)
    farm.held |= {"a": [], "c": []}
    farm.settle()
    assert [one.spec.name for one in farm.held["c"]] == [lost]


def test_half_of_what_is_left_is_kv_memory_where_none_is_named() -> None:
    """The other half is for the next model, which gets a half of that. All ranks have equally much."""
    farm = Farm(Host("a", memory=9 * GIB))
    farm.want("first", need(1, per_token=2**20, context=2**20))
    farm.turn()
    [first] = farm.all()
    assert first.kv_tokens == 4096 and first.memory == [5 * GIB]
    farm.want("second", need(1, tp=2, per_token=2**10, context=2**20))
    farm.turn()
    [second] = (one for one in farm.all() if one.spec.name == "second")
    assert second.kv_tokens == 2**19 and second.memory == [GIB + GIB // 2] * 2


def test_a_share_leaves_what_others_need_at_least() -> None:
    """Of models that are desired together, and of further replicas."""
    farm = Farm(Host("a", memory=9 * GIB))
    farm.want("first", need(1, per_token=2**20, context=512), replicas=2)
    farm.want("second", need(4, per_token=2**20, context=1024))
    farm.settle()
    assert len(farm.all()) == 3 and farm.unplaced == {}
    first, *_ = farm.all()
    assert first.kv_tokens == (9 * GIB - 5 * GIB - (GIB + 2**29) - GIB) // 2**21


def test_kv_memory_is_as_named_or_at_least_a_context_or_4096_tokens() -> None:
    farm = Farm(Host("a", memory=2 * GIB))
    farm.want("m", need(1, per_token=2**18, context=2**20))
    farm.turn()
    assert [(one.kv_tokens, one.memory) for one in farm.all()] == [(LEAST_TOKENS, [2 * GIB])]
    farm = Farm(Host("a", memory=2 * GIB))
    farm.want("m", need(1, per_token=2**20, context=1024))
    farm.turn()
    assert [(one.kv_tokens, one.memory) for one in farm.all()] == [(1024, [2 * GIB])]
    farm = Farm(Host("a", memory=2 * GIB))
    farm.want("m", need(1, per_token=2**20), kv_tokens=100)
    farm.turn()
    assert [(one.kv_tokens, one.memory) for one in farm.all()] == [(None, [GIB + 100 * 2**20])]


def test_a_need_that_was_not_known_moves_what_does_not_serve() -> None:
    """Before a model was downloaded nobody knew; what serves stays."""
    farm = Farm(Host("a", memory=4 * GIB), Host("b", memory=2 * GIB))
    farm.specs["m"] = spec("m")
    farm.turn()
    assert [one.memory for one in farm.held["a"]] == [[]]
    farm.needs["m"] = need(5)
    assert not is_settled(list(farm.specs.values()), list(farm.hosts.values()), farm.held, needs=farm.needs)
    farm.turn()
    farm.go()
    farm.turn()
    assert farm.all() == [] and "m" in farm.unplaced
    farm.needs["m"] = need(1.5)
    farm.settle()
    assert len(farm.all()) == 1


def test_a_replica_on_several_hosts_gets_one_share_once_its_need_is_known() -> None:
    """Half of what the smaller of them has left, on both."""
    farm = Farm(Host("a", memory=20 * GIB), Host("b", memory=11 * GIB))
    farm.specs["m"] = spec("m", tp=2, spread=True)
    farm.turn()
    assert [one.memory for one in farm.all()] == [[], []]
    farm.needs["m"] = need(1, tp=2, per_token=2**20, context=2**20)
    farm.turn()
    assert [(one.kv_tokens, one.memory) for one in farm.all()] == [(5 * 2**10, [6 * GIB])] * 2


def test_hosts_of_an_older_version_take_what_they_are_given() -> None:
    farm = Farm(Host("a"))
    farm.want("m", need(1000))
    farm.settle()
    assert len(farm.all()) == 1


def test_gpus_are_not_counted_with_the_hosts_memory() -> None:
    farm = Farm(Host("a", ("cuda:0",), memory=GIB))
    farm.want("m", need(50))
    farm.settle()
    assert [one.devices for one in farm.all()] == [["cuda:0"]]


SIZES = st.floats(0.1, 6)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("want"), st.sampled_from("mno"), SIZES, st.integers(1, 3), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("unload"), st.sampled_from("mno")),
        st.tuples(st.just("drain"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("lose"), st.integers(0, 3)),
        st.tuples(st.just("turns"), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=10,
)


def play(memories: list[float], changes: list[Any]) -> None:
    """Changes of all kinds, some of them while the last is under way; nothing is ever exceeded, and at rest nothing is
    unplaced that would fit."""
    farm = Farm(*(Host(f"h{index}", memory=int(gib * GIB)) for index, gib in enumerate(memories)))
    revision = 1
    for change in changes:
        match change:
            case ("want", name, gib, tp, replicas, surge):
                revision += 1
                model_need = need(gib, tp, revision, per_token=2**16, context=1024)
                farm.want(name, model_need, replicas=replicas, surge=surge)
            case ("unload", name) if name in farm.specs:
                farm.specs[name] = msgspec.structs.replace(farm.specs[name], unload=True)
            case ("drain", index, drained) if f"h{index}" in farm.hosts:
                host = farm.hosts[f"h{index}"]
                farm.hosts[host.id] = Host(host.id, memory=host.memory, drained=drained)
            case ("lose", index) if f"h{index}" in farm.hosts and len(farm.hosts) > 1:
                del farm.hosts[f"h{index}"]
                farm.turn()
                farm.held[f"h{index}"] = []
            case ("turns", count):
                for _ in range(count):
                    farm.turn()
                    farm.assert_none_is_exceeded()
                    farm.come_up()
            case _:
                pass
        farm.turn()
        farm.assert_none_is_exceeded()
    farm.settle()
    room = {
        host.id: host.memory - farm.used(host.id) for host in farm.hosts.values() if host.memory and not host.drained
    }
    for name in farm.unplaced:
        least = farm.needs[name].bytes_with(1024)
        assert sum(least) > max(room.values(), default=0), (name, room)


FARMS = int(os.environ.get("PLACEMENT_FARMS", "300"))
"""Random farms of a run. `PLACEMENT_FARMS=10000 pytest tests/unit/control/placement/test_memory.py` tries more."""


@settings(max_examples=FARMS, deadline=None)
@given(st.lists(st.floats(1, 12), min_size=1, max_size=4), CHANGES)
def test_no_farm_is_ever_given_more_than_it_has(memories: list[float], changes: list[Any]) -> None:
    play(memories, changes)


@pytest.mark.parametrize("counted", [True, False])
def test_the_control_without_needs_exceeds_a_host(counted: bool) -> None:
    farm = Farm(Host("a", memory=4 * GIB))
    farm.want("first", need(3))
    farm.want("second", need(3))
    actions = plan(
        list(farm.specs.values()), list(farm.hosts.values()), farm.held, needs=farm.needs if counted else None
    )
    assert sum(isinstance(one, Assign) for one in actions) == (1 if counted else 2)
