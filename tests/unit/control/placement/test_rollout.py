"""Changes are rolled out replica by replica: played through here turn by turn, with agents that do as they are told."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from control.messages import Assignment, ModelSpec
from control.placement.placement import Assign, Host, Unplaceable, Withdraw
from control.placement.rollout import Place, free_names, in_order, is_settled, plan

ONE, TWO = Host("a"), Host("b")


def spec(**fields: Any) -> ModelSpec:
    return ModelSpec(name="m", source="/models/m", **fields)


class Play:
    """A farm of which only assignments exist. Replicas serve, and drained ones are gone, when the play says so."""

    def __init__(self, desired: ModelSpec, *hosts: Host) -> None:
        self.desired, self.hosts = desired, list(hosts)
        self.held: dict[str, list[Assignment]] = {host.id: [] for host in hosts}
        self.serving: set[Place] = set()
        self.failed: set[Place] = set()
        self.refused: list[Unplaceable] = []

    def turn(self) -> None:
        """One plan, carried out as far as writing it down goes."""
        self.refused = []
        for action in plan([self.desired], self.hosts, self.held, self.serving, self.failed):
            match action:
                case Assign(host, assignment):
                    others = [one for one in self.held[host] if one.replica != assignment.replica]
                    self.held[host] = [*others, assignment]
                case Withdraw(host, _, replica):
                    self.held[host] = [
                        msgspec.structs.replace(one, withdrawn=True) if one.replica == replica else one
                        for one in self.held[host]
                    ]
                    self.serving.discard(("m", replica))
                case Unplaceable():
                    self.refused.append(action)

    def come_up(self) -> None:
        """Whatever was assigned serves, unless it failed."""
        self.serving |= {("m", one.replica) for one in self.all() if not one.withdrawn} - self.failed

    def go(self) -> None:
        """Whatever was withdrawn has finished what it ran."""
        self.held = {host: [one for one in assignments if not one.withdrawn] for host, assignments in self.held.items()}
        there = {("m", one.replica) for one in self.all()}
        self.serving, self.failed = self.serving & there, self.failed & there

    def all(self) -> list[Assignment]:
        return [one for assignments in self.held.values() for one in assignments]

    def settle(self) -> int:
        """Until nothing changes; the fewest that served at any time."""
        fewest = len(self.serving)
        for _ in range(40):
            before = (self.held, set(self.serving))
            for act in (self.turn, self.come_up, self.go):
                act()
                fewest = min(fewest, len(self.serving))
            if before == (self.held, self.serving):
                return fewest
        raise AssertionError("it never settles")

    def revisions(self) -> list[int]:
        return [one.spec.revision for one in self.all()]


def settled(desired: ModelSpec, *hosts: Host) -> Play:
    play = Play(desired, *hosts)
    play.settle()
    return play


def test_the_new_replica_serves_before_the_old_one_goes() -> None:
    """With room for both: start, wait until it serves, drain."""
    play = settled(spec(), ONE)
    play.desired = spec(revision=2)
    play.turn()
    assert {one.replica: (one.spec.revision, one.withdrawn) for one in play.all()} == {
        "r0": (1, False),
        "r1": (2, False),
    }
    play.turn()
    assert not any(one.withdrawn for one in play.all()), "the new one does not serve yet"
    play.come_up()
    play.turn()
    assert {one.replica: one.withdrawn for one in play.all()} == {"r0": True, "r1": False}
    play.go()
    play.turn()
    assert [(one.replica, one.spec.revision) for one in play.all()] == [("r1", 2)]


def test_without_a_spare_device_the_old_one_goes_first() -> None:
    """One GPU: the successor waits until its host has let go."""
    play = settled(spec(), Host("g", ("cuda:0",)))
    play.desired = spec(revision=2)
    play.turn()
    assert [one.withdrawn for one in play.all()] == [True]
    play.turn()
    assert len(play.all()) == 1
    play.go()
    play.turn()
    assert play.revisions() == [2]


def test_a_model_may_forbid_the_extra_replica() -> None:
    """Memory that is short for two: in place, though the CPU would take another."""
    play = settled(spec(), ONE)
    play.desired = spec(revision=2, surge=False)
    play.turn()
    play.turn()
    assert [one.withdrawn for one in play.all()] == [True], "what leaves still has its memory"
    play.settle()
    assert play.revisions() == [2]


def test_never_more_than_one_extra_even_while_old_ones_take_long_to_go() -> None:
    """Three replicas with long streams: the fourth waits for the first to be gone."""
    play = settled(spec(replicas=3), ONE)
    play.desired = spec(replicas=3, revision=2)
    for _ in range(5):
        play.turn()
        play.come_up()
    assert sorted(play.revisions()) == [1, 1, 1, 2] and sum(one.withdrawn for one in play.all()) == 1
    assert play.settle() == 3 and play.revisions() == [2, 2, 2]


def test_a_revision_that_does_not_come_up_leaves_the_old_ones_serving() -> None:
    """The rollout stops at its first replica; the next revision takes that one's place."""
    play = settled(spec(replicas=2), ONE, TWO)
    play.desired = spec(replicas=2, revision=2)
    play.turn()
    [new] = [one.replica for one in play.all() if one.spec.revision == 2]
    play.failed = {("m", new)}
    assert play.settle() == 2
    assert sorted(play.revisions()) == [1, 1, 2]
    play.desired = spec(replicas=2, revision=3)
    assert play.settle() == 2
    assert play.revisions() == [3, 3]


def test_a_revision_that_no_host_can_hold_takes_nothing_away() -> None:
    """Making room would not help it: it is refused, and the old one goes on."""
    play = settled(spec(), ONE)
    play.desired = spec(revision=2, devices=["cuda:7"])
    play.settle()
    assert play.revisions() == [1] and "cuda:7" in play.refused[0].why


def test_more_and_fewer_replicas_touch_no_other() -> None:
    """Those that stay learn the new number and keep their names; the newest names go first."""
    play = settled(spec(), ONE)
    play.desired = spec(replicas=3)
    assert play.settle() == 1
    assert in_order(one.replica for one in play.all()) == ["r0", "r1", "r2"]
    assert all(one.spec.replicas == 3 for one in play.all())
    play.desired = spec(replicas=1)
    assert play.settle() == 1
    assert [one.replica for one in play.all()] == ["r0"]


def test_fewer_replicas_are_kept_from_those_that_serve() -> None:
    """One that does not serve goes before one that does, whatever its name."""
    play = settled(spec(replicas=2), ONE)
    play.serving = {("m", "r1")}
    play.desired = spec(replicas=1)
    play.turn()
    assert {one.replica: one.withdrawn for one in play.all()} == {"r0": True, "r1": False}


def test_a_drained_host_is_emptied_and_gets_nothing() -> None:
    """Its replica moves where there is room, serving first; undone, nothing moves back."""
    play = settled(spec(replicas=2), ONE, TWO)
    play.hosts = [ONE, Host("b", drained=True)]
    assert play.settle() == 2
    assert len(play.held["a"]) == 2 and play.held["b"] == []
    play.hosts = [ONE, TWO]
    assert is_settled([play.desired], play.hosts, play.held)
    play.settle()
    assert play.held["b"] == []


def test_a_drained_host_is_left_even_if_there_is_no_other_place() -> None:
    """That is what was asked for; the reason why nothing comes up is told."""
    play = settled(spec(), ONE)
    play.hosts = [Host("a", drained=True)]
    play.settle()
    assert play.all() == [] and "no host" in play.refused[0].why


def test_a_replica_over_several_hosts_goes_as_one() -> None:
    """All its parts are withdrawn, and nothing of the successor takes their devices before."""
    play = settled(spec(tp=2, spread=True), Host("a", ("cuda:0",)), Host("b", ("cuda:0",)))
    play.desired = spec(tp=2, spread=True, revision=2)
    play.turn()
    assert [one.withdrawn for one in play.all()] == [True, True]
    play.held["a"] = []
    play.turn()
    assert [one.withdrawn for one in play.all()] == [True]
    play.go()
    play.settle()
    assert play.revisions() == [2, 2]


def test_names_are_free_again_and_in_their_order() -> None:
    """The lowest name that nobody has comes next."""
    names = free_names({"r0", "r2"})
    assert [next(names) for _ in range(3)] == ["r1", "r3", "r4"]
    assert in_order(["r10", "r2"]) == ["r2", "r10"]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_any_run_of_changes_ends_as_desired_and_never_below_what_both_want(changes: list[Any]) -> None:
    """Scaling, reloads and drains in any order, with room for one more: the capacity of neither side is undercut."""
    play = settled(spec(), ONE, TWO)
    for replicas, reload, drain, surge in changes:
        before, revision = len(play.serving), play.desired.revision + reload
        play.desired = spec(replicas=replicas, revision=revision, surge=surge)
        play.hosts = [ONE, Host("b", drained=drain)]
        fewest = play.settle()
        assert fewest >= min(before, replicas) - (not surge)
        assert play.revisions() == [revision] * replicas
        assert not (drain and play.held["b"])
    assert len({one.replica for one in play.all()}) == len(play.all())


def test_a_farm_at_rest_needs_no_look_at_its_replicas() -> None:
    """Assignments alone show which replicas go; only then is their state read."""
    play = settled(spec(replicas=2), ONE)
    assert is_settled([play.desired], play.hosts, play.held)
    assert is_settled([spec(replicas=1, unload=True)], play.hosts, play.held)
    assert not is_settled([spec(replicas=1)], play.hosts, play.held)
    assert not is_settled([spec(replicas=2, revision=2)], play.hosts, play.held)
