"""Figures stand beside their limits; and what the benchmarks make of what they saw."""

from __future__ import annotations

import click
import pytest

from ops.bench.__main__ import VERBS, bench
from ops.bench.load.fairness import Window, tokens_per_second
from ops.bench.load.overload import REFUSED, Phase, figures
from ops.harness.client import Answer
from ops.harness.processes import growth, part_of
from ops.harness.program import Figure, conclude, figures_table


@pytest.mark.parametrize(
    ("figure", "holds"),
    [
        (Figure("a", 2.0, 2.0), True),
        (Figure("a", 2.01, 2.0), False),
        (Figure("a", 90.0, 90.0, at_least=True), True),
        (Figure("a", 89.9, 90.0, at_least=True), False),
    ],
)
def test_a_figure_holds_up_to_its_limit(figure: Figure, holds: bool) -> None:
    """From both sides, the limit itself included."""
    assert figure.holds is holds
    assert ("MISSED" in figures_table([figure])) is not holds


def test_one_missed_figure_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The table is printed all the same."""
    conclude([Figure("fine", 1, 2)])
    with pytest.raises(SystemExit) as missed:
        conclude([Figure("fine", 1, 2), Figure("slow", 3.5, 2, "s")])
    assert missed.value.code == 1
    assert "slow" in (out := capsys.readouterr().out) and "3.50 s" in out and "<= 2 s" in out


def test_no_figure_at_all_is_a_failure() -> None:
    """A figure without a measurement fails."""
    with pytest.raises(SystemExit):
        conclude([])


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_there(verb: str) -> None:
    """Each name in the list leads to a command of that name."""
    command = bench.get_command(click.Context(bench), verb)
    assert command is not None and command.name == verb and command.help


def answer(user: str, rid: str, tokens: int = 100, prompt: int = 40) -> Answer:
    return Answer(user, "m", rid=rid, tokens=tokens, prompt_tokens=prompt)


def test_tokens_count_by_the_part_of_their_time_in_the_window() -> None:
    """Prompts at the claim, generated tokens evenly from first to last; nothing that was outside or has no stamps."""
    inside = {"t_claimed": 1000.0, "t_first": 1000.0, "t_last": 2000.0}
    half = {"t_claimed": 500.0, "t_first": 500.0, "t_last": 1500.0}
    after = {"t_claimed": 4000.0, "t_first": 4000.0, "t_last": 5000.0}
    answers = [answer("a", "inside"), answer("b", "half"), answer("c", "after"), answer("d", "unknown")]
    rates = tokens_per_second(answers, {"inside": inside, "half": half, "after": after}, Window(1000, 3000))
    assert rates == {"a": 70.0, "b": 25.0}


def test_growth_is_between_the_peaks_of_both_halves() -> None:
    """A part that fell does not count as grown; one sample says nothing."""
    assert growth({"api": [70, 80, 81, 79], "rank": [9, 9, 5, 4]}) == {"api": 1, "rank": -4}
    with pytest.raises(ValueError, match="1 samples of redis"):
        growth({"redis": [1.0]})


@pytest.mark.parametrize(
    ("name", "command", "part"),
    [
        ("furrow-rank-0", ["python", "-m", "worker", "rank"], "rank"),
        ("valkey-server", ["valkey-server"], "redis"),
        ("redis-server", ["redis-server"], "redis"),
        ("python", ["python", "-m", "api", "--port", "1"], "api"),
        ("python", ["python", "-m", "worker", "agent"], None),
    ],
)
def test_processes_are_known_by_their_part(name: str, command: list[str], part: str | None) -> None:
    """Ranks, the server and the API are what memory is asked of."""
    assert part_of(name, command) == part


def timed(ttft: float) -> Answer:
    return Answer("u", "m", sent_ms=1000.0, first_ms=1000.0 + ttft)


def test_an_overload_is_judged_by_waiting_refusals_and_memory() -> None:
    """Too long a wait, a refusal without a time, another error, and a part that grows are each a missed figure."""
    nominal = Phase(1.0, [timed(100), timed(200)])
    refusal = Answer("u", "m", error=REFUSED, retry_after_s=3.0)
    grown = {"api": 1.0, "redis": 2.0, "rank": 0.0}
    good = figures(nominal, Phase(10.0, [timed(300), refusal]), grown)
    assert all(figure.holds for figure in good)
    bad_refusal, cut = Answer("u", "m", error=REFUSED), Answer("u", "m", error="connection cut")
    bad = figures(nominal, Phase(10.0, [timed(301), bad_refusal, cut]), {**grown, "api": 99.0})
    assert [figure.name for figure in bad if not figure.holds] == [
        "p99 TTFT of the admitted under overload",
        "refusals without Retry-After",
        "requests that failed otherwise",
        "api: growth of the peak",
    ]
