"""Serving replicas are asked to give KV memory back: by the planner; it is assigned once their leaders tell."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from control.messages import Assignment, ModelSpec
from control.placement import rebalance
from control.placement.demand import Demand, ModelOnDemand, Traffic, WakePlanner, rooms_for_waking
from control.placement.give_back import KvUse, Uses
from control.placement.need import ModelNeed, RankNeed
from control.placement.placement import Action, Assign, Host, Unplaceable
from control.placement.rollout import plan

GIB = 2**30
TOKEN = 2**20
"""Bytes of a KV token: a GiB has 1,024."""
CONTEXT = 1024
HOST = Host("a", memory=8 * GIB, dedicated=True)
FIRST = ModelSpec(name="first", source="/first")
LATER = ModelSpec(name="later", source="/later")
PLACE = ("first", "r0")


def need(gib: float, context: int = CONTEXT) -> ModelNeed:
    rank = RankNeed(weights=int(gib * GIB), kv=0, step=0, process=0, bytes_per_token=TOKEN)
    return ModelNeed(revision=1, context=context, ranks=[rank])


NEEDS = {"first": need(2), "later": need(2)}


def assignment(tokens: int = 6 * 1024, target: int | None = None, spec: ModelSpec = FIRST) -> Assignment:
    """The first model with all that the host had left."""
    memory = [2 * GIB + tokens * TOKEN]
    one = Assignment(spec=spec, replica="r0", ranks=[0], devices=["cpu"], memory=memory, kv_tokens=tokens)
    return msgspec.structs.replace(one, kv_target=target)


def planned(held: Assignment, uses: Uses, *specs: ModelSpec, host: Host = HOST) -> list[Action]:
    return plan(list(specs or (FIRST, LATER)), [host], {"a": [held]}, {PLACE}, needs=NEEDS, uses=uses)


def targets(actions: list[Action]) -> list[int | None]:
    return [one.assignment.kv_target for one in actions if isinstance(one, Assign)]


@pytest.mark.parametrize(("dedicated", "tokens"), [(True, 6 * 1024), (False, 3 * 1024)])
def test_a_share_is_what_is_left_where_the_memory_is_for_ranks_alone(dedicated: bool, tokens: int) -> None:
    """A half of it where other programs have it too."""
    [action] = plan([FIRST], [replace(HOST, dedicated=dedicated)], {"a": []}, needs=NEEDS)
    assert isinstance(action, Assign) and action.assignment.kv_tokens == tokens


def test_a_later_model_gets_what_the_first_one_does_not_use() -> None:
    """Its share is asked for, given back by the leader, written smaller, and only then assigned."""
    actions = planned(assignment(), {PLACE: KvUse(used=100, limit=6 * 1024)})
    assert targets(actions) == [3 * 1024] and assignment().memory == actions[-1].assignment.memory  # type: ignore[union-attr]
    assert [one.why for one in actions if isinstance(one, Unplaceable) and one.waits] == [
        "waits for KV memory that first:r0 gives back"
    ]
    waiting = planned(assignment(target=3 * 1024), {PLACE: KvUse(used=100, limit=6 * 1024)})
    assert [type(one) for one in waiting] == [Unplaceable] and waiting[0].waits  # type: ignore[union-attr]
    smaller, later = planned(assignment(target=3 * 1024), {PLACE: KvUse(used=100, limit=3 * 1024)})
    assert isinstance(smaller, Assign) and isinstance(later, Assign)
    assert (smaller.assignment.kv_tokens, smaller.assignment.kv_target) == (3 * 1024, None)
    assert smaller.assignment.memory == [5 * GIB] and later.assignment.memory == [3 * GIB]
    assert later.assignment.kv_tokens == 1024


def test_what_is_used_is_not_asked_for() -> None:
    """Less is asked for where that is enough for the later model; where it is not, nothing is, with the figures."""
    assert targets(planned(assignment(), {PLACE: KvUse(used=3 * 1024, limit=6 * 1024)})) == [3 * 1024]
    [refused] = planned(assignment(), {PLACE: KvUse(used=3 * 1024 + 1, limit=6 * 1024)})
    assert isinstance(refused, Unplaceable) and not refused.waits and "it needs 3 GiB of memory" in refused.why
    [unknown] = planned(assignment(), {})
    assert isinstance(unknown, Unplaceable) and not unknown.waits


def test_one_whole_context_stays() -> None:
    first = msgspec.structs.replace(need(2, context=4096))
    needs = {"first": first, "later": need(2)}
    uses = {PLACE: KvUse(used=0, limit=6 * 1024)}
    [refused] = plan([FIRST, LATER], [HOST], {"a": [assignment()]}, {PLACE}, needs=needs, uses=uses)
    assert isinstance(refused, Unplaceable) and not refused.waits


def test_named_kv_tokens_are_not_asked_for() -> None:
    named = msgspec.structs.replace(FIRST, kv_tokens=6 * 1024)
    held = msgspec.structs.replace(assignment(spec=named), kv_tokens=None)
    [refused] = planned(held, {PLACE: KvUse(used=0, limit=6 * 1024)}, named, LATER)
    assert isinstance(refused, Unplaceable) and not refused.waits


def test_the_one_that_has_most_gives_first() -> None:
    """Two replicas that share a host; the second gives what the first can't."""
    third = ModelSpec(name="third", source="/third")
    needs = {"first": need(1), "third": need(1), "later": need(1.5)}
    first = Assignment(spec=FIRST, replica="r0", ranks=[0], devices=["cpu"], memory=[3 * GIB], kv_tokens=2048)
    other = Assignment(spec=third, replica="r0", ranks=[0], devices=["cpu"], memory=[4 * GIB], kv_tokens=3072)
    uses = {PLACE: KvUse(used=0, limit=2048), ("third", "r0"): KvUse(used=2000, limit=3072)}
    held = {"a": [first, other]}
    actions = plan([FIRST, third, LATER], [HOST], held, {PLACE}, needs=needs, uses=uses)
    targets = {one.assignment.spec.name: one.assignment.kv_target for one in actions if isinstance(one, Assign)}
    assert targets == {"third": 2000, "first": 2048 - (1536 - 1072)}


def test_a_change_of_the_specification_keeps_what_was_given_back() -> None:
    """Both write the assignment."""
    paused = msgspec.structs.replace(FIRST, paused=True)
    actions = planned(assignment(target=3 * 1024), {PLACE: KvUse(used=0, limit=3 * 1024)}, paused, LATER)
    last = [one.assignment for one in actions if isinstance(one, Assign) and one.assignment.spec.name == "first"][-1]
    assert last.spec.paused and (last.kv_tokens, last.memory) == (3 * 1024, [5 * GIB])


def test_a_rank_of_a_lost_host_starts_with_what_was_asked_for() -> None:
    spec = msgspec.structs.replace(FIRST, tp=2)
    rank = need(2).ranks[0]
    needs = {"first": ModelNeed(revision=1, context=CONTEXT, ranks=[rank, rank])}
    part = Assignment(
        spec=spec, replica="r0", ranks=[0], devices=["cpu"], memory=[4 * GIB], kv_tokens=2048, kv_target=1024
    )
    hosts = [HOST, Host("b", memory=8 * GIB)]
    [action] = plan([spec], hosts, {"a": [part], "b": []}, needs=needs)
    assert isinstance(action, Assign) and action.assignment.ranks == [0, 1]
    assert (action.assignment.kv_tokens, action.assignment.kv_limit) == (2048, 1024)


def test_nothing_is_moved_while_memory_is_given_back() -> None:
    needs = {"first": need(2)}
    assert rebalance.Farm([FIRST], [HOST], {"a": [assignment()]}, needs, {}).is_settled
    assert not rebalance.Farm([FIRST], [HOST], {"a": [assignment(target=2048)]}, needs, {}).is_settled


def test_a_model_that_sleeps_is_woken_beside_one_that_can_give_back() -> None:
    """Nobody goes to sleep for it; where the memory is in use, the other one does."""
    on_demand = {"min_replicas": 0}
    awake, sleeper = (msgspec.structs.replace(spec, **on_demand) for spec in (FIRST, LATER))
    for used, gave_way in ((0, []), (6 * 1024, ["first"])):
        models = [
            ModelOnDemand(awake, Demand(replicas=1, loaded=1, used=1), Traffic(serving=1), {"r0": {"a": assignment()}}),
            ModelOnDemand(sleeper, Demand(replicas=0, waiting=1), Traffic(queued=1)),
        ]
        uses = {PLACE: KvUse(used=used, limit=6 * 1024)}
        rooms = rooms_for_waking([HOST], NEEDS, {"a": [assignment(spec=awake)]}, [awake, sleeper], models, uses)
        woken = WakePlanner(models, *rooms, 10**9).wake({})
        assert woken.gave_way == {"later": gave_way}
