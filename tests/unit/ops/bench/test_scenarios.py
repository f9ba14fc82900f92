"""The scenario table; and what it means for users, models and prompts."""

from __future__ import annotations

import click
import pytest

from ops.bench.load.load import SCENARIOS, scenarios_of
from ops.harness.client import prompt


def test_users_and_models_take_turns() -> None:
    """Every user asks equally often, and every user meets every model."""
    scenario = SCENARIOS["multi-model"]
    turns = [scenario.turn(index) for index in range(scenario.requests)]
    per_user = [sum(user == one for user, _ in turns) for one in range(scenario.users)]
    assert per_user == [10] * 5
    assert set(turns) == {(user, model) for user in range(5) for model in range(2)}
    assert sum(model == 0 for _, model in turns) == 25


def test_an_unknown_scenario_is_refused_with_the_known_ones() -> None:
    """The message names the value and what there is."""
    with pytest.raises(click.UsageError, match=r"no scenario 'havy'.*heavy"):
        scenarios_of(("havy",))


def test_none_named_means_all() -> None:
    """The whole table in its order."""
    assert [scenario.name for scenario in scenarios_of(())] == list(SCENARIOS)


@pytest.mark.parametrize("length", [1, 48, 10_240])
def test_prompts_have_their_length_and_differ_from_the_start(length: int) -> None:
    """Same index, same text; another index, another first word."""
    texts = [prompt(index, length) for index in range(100)]
    assert [prompt(index, length) for index in range(100)] == texts
    assert len({text.split()[0] for text in texts}) == 100
    assert all(len(text) == max(length, len(f"{index}:")) for index, text in enumerate(texts))
