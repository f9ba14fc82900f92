"""The order of a leader's step: when a command goes on with another forward, and what Redis gets when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from control.commands import BatchChange
from control.errors import GroupError, Poisoned
from control.messages import GenerationRequest, Sampling
from control.replicas.lease import Lease
from control.requests import Claimed, Emission, EmitResult
from worker.engine.scoring import PromptScores
from worker.engine.step import Forward
from worker.leader.crash_isolation import CrashIsolation
from worker.leader.exchange import EmissionAnswer, Exchange
from worker.leader.request import RunningRequest
from worker.leader.scheduled_requests import ScheduledRequests
from worker.leader.serving import Serving, ServingContext
from worker.rank.heartbeat import Progress
from worker.sampling.sampler import StepSampler
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Finisher, Sequence

END, VOCABULARY = 9, 10
Event = tuple[str, Any]


class ScriptedRanks:
    """In place of the group and its engine: forward k samples the tokens `script[k]`, by choice."""

    alone, last_seconds, seq = False, 0.001, 1

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.script: list[list[int]] = []
        self.meanwhile: Callable[[], None] = lambda: None
        """The events while a forward runs."""
        self.failure: Exception | None = None
        """Of the other ranks."""
        self._decoding: list[int] = []

    @contextmanager
    def step(self, change: BatchChange, repeat: bool, images: object = None) -> Iterator[ScriptedRanks]:
        gone = {*change.left, *change.paused, *change.kept}
        self._decoding = [sid for sid in self._decoding if sid not in gone] + [row.sid for row in change.rows]
        self._repeat = repeat
        yield self
        self.events.append(("acknowledged", None))
        if self.failure is not None:
            raise self.failure

    def forward(self, targets: object) -> Forward:
        assert targets == {}
        self.events.append(("forward", None))
        self.meanwhile()
        chosen = self.script.pop(0)
        logits = torch.nn.functional.one_hot(torch.tensor(chosen), VOCABULARY).float()
        return Forward(list(self._decoding), logits, PromptScores())

    def run_ahead(self, tokens: torch.Tensor | None) -> None:
        self.events.append(("run ahead", None if tokens is None else tokens.tolist()))

    def agree(self, tokens: list[int], *, more: bool) -> bool:
        assert self._repeat or not more
        self.events.append(("agree", tokens))
        return more


class ScriptedRedis(Exchange):
    """In place of the exchange: takes every emission."""

    def __init__(self, lease: Lease, events: list[Event]) -> None:
        nothing: Any = None
        super().__init__(lease, nothing, nothing)
        self.events = events
        self._emission: EmissionAnswer | None = None

    def start(self, emissions: list[Emission], claim: object) -> None:
        self._emission = self.deliver(emissions, claim)

    def finish(self) -> EmissionAnswer | None:
        emission, self._emission = self._emission, None
        return emission

    def deliver(self, emissions: list[Emission], claim: object) -> EmissionAnswer:
        self.events.append(("offer", [(entry.choice, entry.token) for row in emissions for entry in row.entries]))
        return EmissionAnswer(emissions, EmitResult(0, {}, [], [], [], 0), None)

    def gone_replicas(self) -> list[str]:
        return []

    def was_away(self) -> bool:
        return False


class NoGrammars:
    """In place of the grammars: no request has one."""

    prepared = 0

    def prepare(self) -> None:
        self.prepared += 1

    def ready(self, grammar: object) -> bool:
        return grammar is None

    def constrain(self, sequence: Sequence) -> None:
        assert sequence.sampling.grammar is None


class Scene:
    """A leader of two sequences, the choices 0 and 1 of a request, that have each a first token."""

    def __init__(self, kv_tokens: int = 60, on_device: bool = False) -> None:
        self.events: list[Event] = []
        parts: list[Any] = [ScriptedRanks(self.events), NoGrammars()]
        self.ranks, grammars = parts
        lease = Lease("m", "r0", "o", 1)
        exchange = ScriptedRedis(lease, self.events)
        exchange.gather_s = 0.0
        self.scheduler = Scheduler(kv_tokens=kv_tokens, token_budget=16, max_sequences=4)
        isolation = CrashIsolation(lease, lambda call: None)
        self.running = ScheduledRequests(self.scheduler, Finisher(lambda ids: ""), grammars, isolation)
        self.serving = Serving(
            ServingContext(
                lease=lease,
                group=self.ranks,
                running=self.running,
                exchange=exchange,
                progress=Progress(),
                check=lambda: None,
                sampler=StepSampler(on_device),
            )
        )
        self.serving.repeat_within_s = 3600.0
        self.request = self.claimed("r", n=2)
        self.run(1, [3, 3])

    def claimed(self, rid: str, n: int = 1) -> RunningRequest:
        """A request that has come and been read."""
        sampling = Sampling(max_tokens=30, temperature=0.0, seed="0", n=n, stop_ids=[END])
        params = GenerationRequest(prompt=[1], sampling=sampling)
        request = RunningRequest.begin(Claimed(rid, "t", "normal", 1, 0, 0, n, 0), params)
        self.running.add(request)
        return request

    def run(self, steps: int, *script: list[int]) -> list[Event]:
        """The events of so many steps, whose forwards sample this in all."""
        self.events.clear()
        self.ranks.script = list(script)
        for _ in range(steps):
            self.serving.turn()
        self.serving.deliver()
        assert self.ranks.script == []
        return self.events

    @property
    def outputs(self) -> list[list[int]]:
        """The tokens of each choice."""
        entries = self.request.history[:]
        return [[entry.token for entry in entries if entry.choice == choice] for choice in range(2)]  # type: ignore[misc]


@pytest.fixture
def scene() -> Scene:
    """With time for any number of forwards."""
    return Scene()


def test_tokens_wait_for_the_next_step_where_it_ends_in_time() -> None:
    """The exchange has emitted nothing since the clock's beginning."""
    exchange = ScriptedRedis(Lease("m", "r0", "o", 1), [])
    exchange.gather_s = time.monotonic() + 100
    assert not exchange.gathered(50.0)
    assert exchange.gathered(150.0)


def names(events: list[Event]) -> list[str]:
    return [name for name, _ in events]


FORWARD = ["forward", "run ahead", "agree"]


def test_a_step_reads_from_top_to_bottom(scene: Scene) -> None:
    """Each forward with what follows it, then the ranks' acknowledgement, and only then are its tokens offered."""
    assert names(scene.run(1, [4, 5], [6, END])) == [*FORWARD, *FORWARD, "acknowledged", "offer"]
    assert scene.events[-1] == ("offer", [(0, 4), (1, 5), (0, 6), (1, END)])


def test_tokens_are_offered_while_the_next_step_runs(scene: Scene) -> None:
    """After its command has been sent, and before its forward."""
    scene.serving.repeat_within_s = 0.0
    events = scene.run(2, [4, 5], [6, 7])
    assert names(events) == [*FORWARD, "acknowledged", "offer", *FORWARD, "acknowledged", "offer"]
    assert [tokens for name, tokens in events if name == "offer"] == [[(0, 4), (1, 5)], [(0, 6), (1, 7)]]


def test_the_next_step_is_launched_before_the_host_has_the_tokens() -> None:
    """Where they are on the device; elsewhere there is nothing to launch it with."""
    for on_device, launched in ((True, [4, END]), (False, None)):
        assert ("run ahead", launched) in Scene(on_device=on_device).run(1, [4, END])


def test_a_command_goes_on_as_long_as_nothing_changes(scene: Scene) -> None:
    """Each forward's tokens are applied before the next, and the end of a sequence ends the command."""
    scene.run(1, [4, 5], [6, 7], [8, END])
    assert scene.outputs == [[3, 4, 6, 8], [3, 5, 7, END]]
    assert scene.scheduler.schedule().change.left == [2]


def test_a_leader_alone_has_a_command_for_each_forward(scene: Scene) -> None:
    """A command costs it nothing, and Redis is heard after each."""
    scene.ranks.alone = True
    assert names(scene.run(1, [4, 5])).count("forward") == 1


def test_a_command_ends_for_a_request_that_comes(scene: Scene) -> None:
    """It waits for no more than the forward under way."""
    scene.ranks.meanwhile = lambda: scene.claimed("new") and None
    assert names(scene.run(1, [4, 5])).count("forward") == 1


def test_a_command_ends_for_a_request_that_leaves(scene: Scene) -> None:
    """A cancelled request costs no further forward, and its neighbour has its token."""
    scene.ranks.meanwhile = lambda: scene.scheduler.drop(1)
    scene.run(1, [4, 5])
    assert scene.outputs[1] == [3, 5]


def test_a_command_ends_when_it_has_lasted_long_enough(scene: Scene) -> None:
    """Requests that arrive meanwhile are heard of between commands only."""
    scene.serving.repeat_within_s = 0.0
    assert names(scene.run(1, [4, 5])).count("forward") == 1


def test_a_command_ends_where_memory_runs_out() -> None:
    """A plan of its own preempts the younger sequence."""
    scene = Scene(kv_tokens=31)
    scene.run(1, *[[4, 5]] * 14)
    assert len(scene.outputs[0]) == 15
    assert scene.scheduler.schedule().change.left == [2]


def test_what_a_failed_step_has_applied_reaches_nobody(scene: Scene) -> None:
    """Another rank fails after the leader's own part: the epoch is poisoned, and no token of the step is offered."""
    scene.ranks.failure = GroupError("step", None, [])
    with pytest.raises(Poisoned):
        scene.run(1, [4, END])
    assert names(scene.events) == [*FORWARD, "acknowledged"]
