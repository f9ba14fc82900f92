"""A row that can't be sampled fails alone: sick ones too."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import structlog
import torch

from control.messages import ReasoningBudget, Sampling
from worker.engine.step import NO_TOKEN, Forward
from worker.sampling import constraints
from worker.sampling.sampler import LogitsHealth, StepSampler, StepTokens
from worker.sampling.torch.sampler import TensorLogits, TensorSampler
from worker.scheduling.sequence import Sequence

VOCABULARY = 5


def rows(count: int, **sampling: object) -> list[Sequence]:
    fields = {"max_tokens": 9, "temperature": 0.0, "seed": "1"} | sampling
    return [
        Sequence(rid=f"r{sid}", choice=0, prompt=[1], sampling=Sampling(**fields), sid=sid)  # type: ignore[arg-type]
        for sid in range(1, count + 1)
    ]


def logits(count: int) -> torch.Tensor:
    """Row i's best token is i."""
    return torch.eye(count, VOCABULARY)


def sampled(sampler: StepSampler, rows: list[Sequence], scores: torch.Tensor) -> StepTokens:
    """All that comes of a forward with these logits."""
    return sampler.begin(rows, Forward([row.sid for row in rows], scores)).wait()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("on_device", [None, True])
def test_logits_that_are_not_finite_fail_their_row_only(
    value: float, temperature: float, on_device: bool | None
) -> None:
    """Greedy or not, the sick row gets no token and a reason with its numbers; its neighbours are not touched."""
    sampler, batch = StepSampler(on_device), rows(3, temperature=temperature)
    sick = logits(3)
    sick[1, 4] = value
    alone = sampled(sampler, batch, logits(3)).ids
    with structlog.testing.capture_logs() as lines:
        tokens = sampled(sampler, batch, sick)
    assert tokens.ids == [alone[0], NO_TOKEN, alone[2]]
    assert set(tokens.failures) == {1}
    for figure in ("len=5", "nan=", "pos_inf=", "neg_inf=", "finite_min=0.0", "max=1.0", "mean="):
        assert figure in tokens.failures[1]
    [line] = lines
    assert (line["rid"], line["event"]) == ("r2", "a row failed")


def test_a_row_that_can_not_be_sampled_spares_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in one row's parameters is found by sampling each alone; the others get what they get without it."""
    sampler, batch = StepSampler(), rows(3)
    broken = batch[1]
    real = TensorSampler.sample

    def sample(self: TensorSampler, scores: torch.Tensor, given: list[object]) -> object:
        if any(row.prompt is broken.prompt for row in given):  # type: ignore[attr-defined]
            raise RuntimeError("this row's penalties overflow")
        return real(self, scores, given)  # type: ignore[arg-type]

    monkeypatch.setattr(TensorSampler, "sample", sample)
    with structlog.testing.capture_logs():
        tokens = sampled(sampler, batch, logits(3))
    assert tokens.ids == [0, NO_TOKEN, 2]
    assert set(tokens.failures) == {1} and "could not be sampled" in tokens.failures[1]


@pytest.mark.parametrize("on_device", [None, True])
def test_a_row_whose_constraints_raise_spares_the_others(
    monkeypatch: pytest.MonkeyPatch, on_device: bool | None
) -> None:
    """The others keep their own constraints: the third may not have its best token."""
    batch = [*rows(2), *rows(3, bad_words=[[2]])[2:]]
    real = constraints.forced_tokens

    def forced_tokens(rows: list[Sequence], decode: object) -> dict[int, int]:
        if any(row.rid == "r2" for row in rows):
            raise IndexError("a fault of the program")
        return real(rows, None)

    monkeypatch.setattr(constraints, "forced_tokens", forced_tokens)
    with structlog.testing.capture_logs() as lines:
        tokens = sampled(StepSampler(on_device), batch, logits(3))
    assert tokens.ids == [0, NO_TOKEN, 0]
    assert set(tokens.failures) == {1}
    assert [line["rid"] for line in lines if line["event"] == "could not constrain a row"] == ["r2"]


def test_a_step_without_a_sampled_row_has_no_token() -> None:
    """A chunk of a prompt alone; nothing is sampled, on a device or here."""
    for on_device in (None, True):
        pending = StepSampler(on_device).begin([], Forward([], torch.empty(0, VOCABULARY)))
        assert pending.on_device is None and pending.wait() == StepTokens([])


def test_log_probabilities_are_those_of_the_rows_that_want_them() -> None:
    """By index."""
    batch = [rows(1)[0], *rows(2, logprobs=1)[1:]]
    assert set(sampled(StepSampler(), batch, logits(2)).logprobs) == {1}


def test_rows_of_another_plan_are_refused() -> None:
    """If engine and scheduler disagree on who is sampled no token may be given to anybody."""
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        StepSampler().begin(rows(2), Forward([2, 1], logits(2)))


def test_a_gpu_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all rows allow it no other way is taken, and where one row wants more all rows take the other."""
    sampler, batch = StepSampler(on_device=True), rows(3)
    asked: list[int] = []
    real = TensorSampler.sample
    monkeypatch.setattr(
        TensorSampler, "sample", lambda self, scores, given: asked.append(len(given)) or real(self, scores, given)
    )
    pending = sampler.begin(batch, Forward([1, 2, 3], logits(3)))
    assert pending.on_device is not None and pending.on_device.tolist() == pending.wait().ids == [0, 1, 2]
    assert asked == []
    pending = sampler.begin([*batch[:2], *rows(3, logprobs=1)[2:]], Forward([1, 2, 3], logits(3)))
    assert pending.on_device is None
    tokens = pending.wait()
    assert tokens.ids == [0, 1, 2] and asked == [3] and set(tokens.logprobs) == {2}
    assert StepSampler().on_device is None


@pytest.mark.parametrize("on_device", [None, True])
def test_bad_words_hold_after_an_adoption_and_for_each_choice(on_device: bool | None) -> None:
    """Forbidden tokens follow from the output alone: a new sampler that continues it forbids the same."""
    batch = rows(3, bad_words=[[0], [4, 1], [4, 3, 2]])
    batch[1].output, batch[2].output = [4], [4, 3]
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]]).expand(3, -1)
    assert sampled(StepSampler(on_device), batch, scores).ids == [1, 2, 1]
    batch[2].output = [4, 3, 1]
    assert sampled(StepSampler(on_device), batch[2:], scores[:1] - scores[:1].flip(-1)).ids == [1]


def test_bad_words_that_leave_no_token_fail_their_row_only() -> None:
    """The message names the parameter; the neighbour, whose rid is another's, gets its token."""
    batch = [*rows(1, bad_words=[[token] for token in range(VOCABULARY)]), *rows(2)[1:]]
    tokens = sampled(StepSampler(), batch, logits(2))
    assert tokens.ids == [NO_TOKEN, 1]
    assert "'bad_words' forbids every token" in tokens.failures[0]


@pytest.mark.parametrize(
    "wish",
    [
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 5.0},
        {"bad_words": [[2, 3, 0, 0]]},
        {"min_tokens": 3, "stop_ids": [0]},
        {"temperature": 2.0, "seed": "5"},
        {"reasoning": ReasoningBudget(tokens=3, open="", close="", opening=[9], closing=[4], begun=True)},
    ],
    ids=lambda wish: "-".join(wish),
)
def test_a_row_after_a_guess_is_that_of_the_longer_output(wish: dict[str, object]) -> None:
    """Whatever reads the output reads the guess too, and the guess costs no copy of the output."""
    batch = rows(1, **wish)
    batch[0].output = [2, 3]
    scores = torch.tensor([[0.9, 0.5, 0.0, 0.0, 0.2]])
    [first] = sampled(StepSampler(), batch, scores).ids
    guessed = batch[0].followed_by(first)
    longer = replace(batch[0], output=[2, 3, first])
    [second] = sampled(StepSampler(), [longer], scores).ids
    assert sampled(StepSampler(), [batch[0], guessed], scores.expand(2, -1)).ids == [first, second]
    assert second != first and guessed.output is batch[0].output and guessed.position == 3


NAN, INF = math.nan, math.inf


def inspect(logits: torch.Tensor) -> dict[int, LogitsHealth]:
    return TensorLogits(logits).inspect()


def test_healthy_rows_are_not_reported() -> None:
    """Finite logits give no report."""
    assert inspect(torch.randn(4, 100)) == {}


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_bad_value_is_found(value: float, dtype: torch.dtype) -> None:
    """One value among many makes its row sick, and only its row."""
    logits = torch.zeros(3, 1000, dtype=dtype)
    logits[1, 777] = value
    assert list(inspect(logits)) == [1]


def test_the_report_counts_each_kind_of_number() -> None:
    """The report counts each kind and describes the finite rest."""
    logits = torch.tensor([[NAN, INF, INF, -INF, -INF, -INF, -2.0, 4.0, 1.0]])
    assert inspect(logits) == {0: LogitsHealth(len=9, nan=1, pos_inf=2, neg_inf=3, finite_min=-2.0, max=4.0, mean=1.0)}


def test_a_row_without_finite_values_has_no_minimum() -> None:
    """A row without a finite value has no minimum, maximum and mean."""
    assert inspect(torch.full((1, 3), NAN))[0] == LogitsHealth(
        len=3, nan=3, pos_inf=0, neg_inf=0, finite_min=None, max=None, mean=None
    )


def test_infinities_of_both_signs_are_found() -> None:
    """Infinities of both signs don't hide each other."""
    assert list(inspect(torch.tensor([[INF, -INF, 0.0]]))) == [0]


def test_large_finite_values_are_healthy() -> None:
    """Finite values of which the sum overflows are no fault."""
    assert inspect(torch.full((1, 10), 3e38)) == {}


def test_healthy_batch_costs_one_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row of a healthy batch is looked at by itself."""
    monkeypatch.setattr("worker.sampling.torch.sampler.describe", None)
    monkeypatch.setattr(torch.Tensor, "all", None)
    assert inspect(torch.zeros(4, 10)) == {}
