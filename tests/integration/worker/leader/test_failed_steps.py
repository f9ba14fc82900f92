"""A failed row, step or forward ends only its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.integration.worker.leader_scene import LeaderScene
from tests.waiting import until
from worker.engine.step import Step
from worker.leader.request import RunningRequest
from worker.sampling.torch.sampler import TensorLogits
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Finisher


def test_a_row_that_fails_ends_its_request_and_no_other(scene: LeaderScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sick logits of one sequence: an error with the figures in its log, tokens for its neighbour, no poison."""
    scene.ask("whole", max_tokens=150)
    expected = scene.answer("whole")
    real, healthy = TensorLogits.inspect, [True]

    def inspect(rows: Any) -> Any:
        if healthy and len(rows._logits) == 2:
            healthy.clear()
            rows._logits = rows._logits.clone()
            rows._logits[0, 3] = float("nan")
        return real(rows)

    before = scene.epoch()
    monkeypatch.setattr(TensorLogits, "inspect", inspect)
    for rid in ("first", "second"):
        scene.ask(rid, max_tokens=150)
    assert expected in [scene.answer("first"), scene.answer("second")]
    [failed] = [end for end in (scene.log("first")[-1], scene.log("second")[-1]) if end.finish == "error"]
    assert failed.token is None and "nan=1" in (failed.cause or "")
    assert scene.epoch() == before


def test_a_step_that_fails_is_logged_with_its_requests(scene: LeaderScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks know sequences and say which command failed: the leader's line says whose it was."""
    until(scene.epoch, 40.0)
    real, faults = Step.forward, [MemoryError("once")]

    def forward(step: Step, *how: Any) -> Any:
        if faults and step.command.change.rows:
            raise faults.pop()
        return real(step, *how)

    monkeypatch.setattr(Step, "forward", forward)
    with capture_logs() as lines:
        scene.ask("r", max_tokens=3)
        scene.answer("r")
    [line] = [line for line in lines if line["event"] == "the step failed"]
    assert list(line["requests"].values()) == ["r"] and line["seq"] > 0


def test_a_forward_that_keeps_failing_rests_between_epochs_and_then_goes_on(
    scene: LeaderScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each epoch without a step waits longer than the one before; when the fault passes, the answer is right."""
    scene.ask("whole")
    expected = scene.answer("whole")
    rests: list[float] = []
    real_rest, real_forward = scene.leader._rest, Step.forward
    monkeypatch.setattr(scene.leader, "_rest", lambda seconds: rests.append(seconds) or real_rest(seconds))

    def forward(step: Step, *how: Any) -> Any:
        if len(rests) < 4:
            raise MemoryError("a forward that is too large")
        return real_forward(step, *how)

    monkeypatch.setattr(Step, "forward", forward)
    scene.ask("hard")
    assert scene.answer("hard") == expected
    assert scene.redis.client.xlen(scene.keys.dead) == 0, (
        "a device that fails whatever it is given makes no dead letter"
    )
    # The first of these epochs had completed steps for the other request, so its end costs no rest.
    assert rests[0] == 0 < rests[1] < rests[2] < rests[3]


HOST_FAULTS: list[tuple[Any, str, Callable[..., str]]] = [
    (RunningRequest, "append", lambda request, *_: request.rid),
    (Finisher, "adopt", lambda _, sequence: sequence.rid),
    (Scheduler, "add", lambda _, sequence: sequence.rid),
]


@pytest.mark.parametrize(
    ("owner", "method", "rid_of"), HOST_FAULTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_an_exception_of_the_host_ends_its_request_and_no_other(
    scene: LeaderScene, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, rid_of: Callable[..., str]
) -> None:
    """That request gets an error, its neighbour all of its tokens, and
    the epoch goes on."""
    scene.ask("whole", max_tokens=60)
    expected = scene.answer("whole")
    before = scene.epoch()
    real = getattr(owner, method)
    faults = [1]

    def broken(self: Any, *arguments: Any, **fields: Any) -> Any:
        if faults and rid_of(self, *arguments) == "broken":
            faults.clear()
            raise KeyError("a fault of the program")
        return real(self, *arguments, **fields)

    monkeypatch.setattr(owner, method, broken)
    with capture_logs() as lines:
        scene.ask("broken", max_tokens=60)
        scene.ask("sound", max_tokens=60)
        assert scene.answer("sound") == expected
        scene.answer("broken")
    assert scene.log("broken")[-1].finish == "error" and "server's log" in (scene.log("broken")[-1].cause or "")
    assert scene.epoch() == before
    [line] = [line for line in lines if line.get("action") == "fail_request"]
    assert line["rid"] == "broken" and line["exc_info"]


def test_a_request_that_can_not_be_read_is_a_dead_letter(scene: LeaderScene) -> None:
    """Its stored parameters are damaged: the claim that brought it serves the others, and the operator finds it."""
    until(scene.epoch, 40.0)
    scene.stop()  # so that it is damaged before it is claimed
    scene.ask("damaged", max_tokens=5)
    scene.redis.client.hset(scene.keys.request("damaged"), "params", '{"prompt": "no tokens"}')
    scene.ask("sound", max_tokens=5)
    scene.start()
    assert len(scene.answer("sound")) == 5
    before = scene.epoch()
    scene.answer("damaged")
    assert scene.state("damaged") == "dead" and "ValidationError" in (scene.log("damaged")[-1].cause or "")
    assert scene.redis.client.xlen(scene.keys.dead) == 1
    scene.ask("later", max_tokens=5)
    assert len(scene.answer("later")) == 5
    assert scene.epoch() == before
