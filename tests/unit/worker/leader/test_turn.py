"""When a command goes on with another forward, and that each token is booked once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from control.messages import Sampling, TokenLogprobs
from worker.leader import turn as turn_module
from worker.leader.turn import Turn
from worker.sampling.step_sampler import StepSampler
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Sequence

END = 9


class Requests:
    """In place of the leader's roster: ends a sequence at the token END."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.urgent = scheduler, False
        self.heard: list[tuple[int, int]] = []

    def sampled(self, sequence: Sequence, token: int, _logprobs: TokenLogprobs | None) -> None:
        self.heard.append((sequence.choice, token))
        if token == END:
            self.urgent = True
            self.scheduler.drop(sequence.sid)


@pytest.fixture
def scheduler() -> Scheduler:
    """Two sequences that have each a first token."""
    scheduler = Scheduler(kv_tokens=40, token_budget=16, max_sequences=4)
    for choice in (1, 2):
        scheduler.add(sequence(choice))
    plan = scheduler.plan()
    scheduler.applied(plan, dict.fromkeys(plan.sampled, 3))
    return scheduler


def sequence(choice: int) -> Sequence:
    return Sequence(rid="r", choice=choice, prompt=[1], sampling=Sampling(max_tokens=30))


def begun(scheduler: Scheduler) -> tuple[Turn, Requests]:
    requests = Requests(scheduler)
    return Turn(scheduler, requests, StepSampler(), scheduler.plan()), requests  # type: ignore[arg-type]


def test_it_goes_on_as_long_as_nothing_changes(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forward is booked before the next; the last one by whoever has heard that all ranks have it."""
    monkeypatch.setattr(turn_module, "LONGEST_S", 3600.0)
    turn, requests = begun(scheduler)
    assert turn.goes_on([4, 5]) and turn.goes_on([6, 7])
    assert requests.heard == [(1, 4), (2, 5), (1, 6), (2, 7)]
    assert not turn.goes_on([8, END])
    turn.book([8, END])
    assert requests.heard[4:] == [(1, 8), (2, END)]
    assert scheduler.plan().left == [2]


def waits(scheduler: Scheduler) -> None:
    scheduler.add(sequence(3))


def leaves(scheduler: Scheduler) -> None:
    scheduler.drop(1)


@pytest.mark.parametrize("change", [waits, leaves])
def test_it_stops_for_who_comes_or_goes(
    scheduler: Scheduler, change: Callable[[Scheduler], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits is not kept waiting, and who was cancelled costs one forward more at most."""
    monkeypatch.setattr(turn_module, "LONGEST_S", 3600.0)
    turn, requests = begun(scheduler)
    change(scheduler)
    assert not turn.goes_on([4, 5])
    turn.book([4, 5])
    assert (2, 5) in requests.heard
    scheduler.plan()


def test_it_stops_when_it_has_lasted_long_enough(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is booked before the ranks have acknowledged it."""
    monkeypatch.setattr(turn_module, "LONGEST_S", 0.0)
    turn, requests = begun(scheduler)
    assert not turn.goes_on([4, 5]) and requests.heard == []
    turn.book([4, 5])
    assert requests.heard == [(1, 4), (2, 5)]


def test_it_stops_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who must give way is a matter for the next plan."""
    monkeypatch.setattr(turn_module, "LONGEST_S", 3600.0)
    scheduler = Scheduler(kv_tokens=31, token_budget=16, max_sequences=4)
    for choice in (1, 2):
        scheduler.add(sequence(choice))
    for _ in range(2):
        plan = scheduler.plan()
        scheduler.applied(plan, dict.fromkeys(plan.sampled, 3))
    turn, requests = begun(scheduler)
    forwards = 1
    while turn.goes_on([4, 5]):
        forwards += 1
    assert len(requests.heard) == 2 * forwards
    assert scheduler.plan().left == [2]
