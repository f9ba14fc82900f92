"""Culprits of a crash are found by halves: against a group that crashes whenever one of them is in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control.messages import encode
from worker.leader.crash_isolation import LONE_KILLS, PROOF_TOKENS, CrashRecord, decode_record


@dataclass
class Farm:
    """Epochs over `alive` requests: each is adopted, watched or tried, and ends in a crash or with everybody cleared.

    `kills` says for one epoch after another whether something outside ends it in its first step.
    """

    alive: list[str]
    culprits: set[str]
    kind: str = "step_failed"
    kills: list[bool] = field(default_factory=list)
    seqs: dict[str, int] = field(default_factory=dict)
    record: CrashRecord = field(default_factory=CrashRecord)
    end: str | None = None
    epoch: int = 1
    crashes: int = 1
    """The one before the first adoption."""
    buried: list[str] = field(default_factory=list)
    lone: list[str] = field(default_factory=list)
    """Requests that were alone in a step that ended its epoch."""

    def step(self, rids: list[str]) -> bool:
        """Write down, then run; False where it ends the epoch. Rows that are run get as far as clears them."""
        tried = {rid: self.seqs[rid] + PROOF_TOKENS for rid in rids}
        self.record = decode_record(encode(self.record.before_step(self.epoch, tried, alone=len(rids) == 1)))
        killed = bool(self.kills) and self.kills.pop(0)
        self.end = "exited" if killed else self.kind if self.culprits & set(rids) else None
        if self.end is not None:
            self.crashes += 1
            self.lone += rids if len(rids) == 1 else []
            return False
        for rid in rids:
            self.seqs[rid] += PROOF_TOKENS
        self.record = self.record.without(rids)
        return True

    def run_epoch(self) -> bool:
        """Adopt, judge, then run trials until none is due and everybody together; False where it crashed."""
        self.epoch += 1
        self.record, culprit = self.record.judged(self.end, self.seqs)
        assert self.record.judged(None, self.seqs)[0].suspects == self.record.suspects
        if culprit:
            self.buried.append(culprit)
            self.alive.remove(culprit)
            del self.seqs[culprit]
        while trial := self.record.trial:
            if not self.step(trial):
                return False
        return not self.alive or self.step(self.alive)

    def run(self, limit: int = 500) -> None:
        """Raises AssertionError where it does not come to an end."""
        self.seqs = dict.fromkeys(self.alive, 0)
        for _ in range(limit):
            if self.run_epoch():
                return
        raise AssertionError(f"still crashing after {self.crashes} crashes: {self.record}")


def farm(count: int, *culprits: int, **fields: object) -> Farm:
    return Farm([f"r{i}" for i in range(count)], {f"r{i}" for i in culprits}, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 31, 32, 100])
def test_one_culprit_costs_no_more_than_its_halvings(count: int) -> None:
    """Wherever it stands among n: two crashes make suspects, ceil(log2 n) find it, and nobody else is buried."""
    for culprit in range(count):
        group = farm(count, culprit)
        group.run()
        assert group.buried == [f"r{culprit}"]
        assert group.crashes <= math.ceil(math.log2(count)) + 2


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_every_culprit_is_found_and_nobody_else(drawn: tuple[int, set[int]]) -> None:
    """Several culprits converge too; all others finish."""
    count, culprits = drawn
    group = farm(count, *culprits)
    group.run()
    assert set(group.buried) == {f"r{i}" for i in culprits}
    assert group.crashes <= 2 + len(culprits) * (math.ceil(math.log2(count)) + 1)


@given(
    st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=2))),
    st.lists(st.booleans(), max_size=40),
)
def test_kills_from_outside_only_delay(drawn: tuple[int, set[int]], kills: list[bool]) -> None:
    """Unless the very same request is alone at each of three kills in a row, only culprits are buried, and all."""
    count, culprits = drawn
    group = farm(count, *culprits, kills=kills)
    group.run()
    killed_alone = {rid for rid in group.lone if group.lone.count(rid) >= LONE_KILLS}
    assert {f"r{i}" for i in culprits} <= set(group.buried)
    assert set(group.buried) <= {f"r{i}" for i in culprits} | killed_alone


def test_a_culprit_that_has_its_process_killed_needs_more_evidence() -> None:
    """The memory killer's SIGKILL looks like anybody's: made a dead letter by the third end that it met alone."""
    group = farm(8, 0, kind="exited")
    group.run()
    assert group.buried == ["r0"] and group.lone == ["r0"] * LONE_KILLS
    assert group.crashes == 2 + 3 + LONE_KILLS - 1


def test_an_end_without_poison_adds_no_suspect() -> None:
    """A lost lock or an orderly stop: the trial is repeated as it was."""
    record = CrashRecord(crashed_together=["a", "b"], rest=["c"]).before_step(7, {"a": 2}, alone=True)
    again, culprit = record.judged(None, {"a": 0, "b": 0, "c": 0})
    assert (again.trial, again.suspects, again.lone, culprit) == (["a"], ["a", "b", "c"], {}, None)


def test_progress_clears_even_where_the_epoch_ends_in_a_crash() -> None:
    """A request that reached its goal is no suspect; one that produced less is."""
    record = CrashRecord().before_step(7, {"a": 12, "b": 12, "c": 12}, alone=False)
    judged, culprit = record.judged("step_failed", {"a": 12, "b": 11, "c": 10})
    assert (judged.crashed_together, judged.rest, culprit) == (["b", "c"], [], None)


def test_a_suspect_that_did_not_run_alone_is_tried_again() -> None:
    """The only suspect of a step that others had rows in has yet to crash alone."""
    record = CrashRecord().before_step(7, {"a": 2}, alone=False)
    judged, culprit = record.judged("step_failed", {"a": 0})
    assert (judged.trial, culprit) == (["a"], None)
    assert judged.before_step(8, {"a": 2}, alone=True).judged("step_failed", {"a": 0}) == (CrashRecord(), "a")


def test_who_has_ended_is_forgotten() -> None:
    """A suspect that was cancelled meanwhile is neither tried nor suspected."""
    record = CrashRecord(crashed_together=["a", "b"], lone={"a": 1}).before_step(7, {"a": 2}, alone=True)
    judged, culprit = record.judged("step_failed", {"b": 0})
    assert (judged.suspects, judged.lone, culprit) == (["b"], {}, None)


def test_judging_twice_is_judging_once() -> None:
    """A leader that dies after its verdict leaves it to the next, which comes to the same."""
    record = CrashRecord(crashed_together=["a"], rest=["b"]).before_step(7, {"a": 2}, alone=True)
    seqs = {"a": 0, "b": 0}
    assert record.judged("exited", seqs) == record.judged("exited", seqs)
    assert record.judged("exited", seqs)[0].lone == {"a": 1}
    judged, culprit = record.judged("crashed", seqs)
    assert culprit == "a"
    assert record.judged("crashed", {"b": 0})[0].suspects == judged.suspects == ["b"]


def test_a_docket_that_is_inherited_joins_one_s_own() -> None:
    """Own suspects come first; what is known of the other's is kept where there are none, and nobody is in it twice."""
    other = CrashRecord(crashed_together=["a", "b"], rest=["c"], lone={"a": 2})
    alone = CrashRecord(lone={"a": 1}).joined(other)
    assert (alone.crashed_together, alone.rest, alone.lone) == (["a", "b"], ["c"], {"a": 2})
    both = CrashRecord(crashed_together=["x"], rest=["a"], lone={"x": 1}).joined(other)
    assert (both.crashed_together, both.rest, both.lone) == (["x"], ["a", "b", "c"], {"x": 1, "a": 2})
    assert both.joined(CrashRecord()) == both


@given(st.integers(2, 24), st.integers(0, 23), st.integers(1, 8))
def test_a_trial_that_another_replica_takes_up_ends_as_soon(count: int, culprit: int, hand_on: int) -> None:
    """Whenever the replica is given up, its heir goes on with what is known: no crash is needed twice."""
    group = farm(count, culprit % count)
    group.seqs = dict.fromkeys(group.alive, 0)
    for epoch in range(100):
        if epoch == hand_on:
            judged, found = group.record.judged(group.end, group.seqs)
            if found is None:
                group.record, group.end = CrashRecord().joined(judged), None
        if group.run_epoch():
            break
    assert group.buried == [f"r{culprit % count}"]
    assert group.crashes <= math.ceil(math.log2(count)) + 2
