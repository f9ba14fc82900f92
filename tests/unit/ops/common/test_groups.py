"""Commands are imported when called."""

from __future__ import annotations

import gc

import pytest
from click.testing import CliRunner

from ops.cli import SECTIONS, VERBS, cli
from ops.common.groups import without_collections


def test_imports_are_not_visited_by_collections() -> None:
    """Neither while they run nor after them."""
    collections = [stats["collections"] for stats in gc.get_stats()]
    with without_collections():
        made = [[] for _ in range(50_000)]
        assert [stats["collections"] for stats in gc.get_stats()] == collections
    try:
        assert gc.isenabled()
        assert not any(one is made[0] for one in gc.get_objects())
    finally:
        gc.unfreeze()


def test_the_help_has_each_verb_once() -> None:
    named = [verb for verbs in SECTIONS.values() for verb in verbs]
    assert sorted(named) == sorted(VERBS)
    output = CliRunner().invoke(cli, ["--help"], prog_name="furrow").output
    assert all(f"\n{heading}:\n" in output for heading in SECTIONS)
    assert "furrow serve ~/models" in output


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("srve", "Did you mean 'serve' or 'service'?"), ("modles", "Did you mean 'models'?"), ("zzzz", "")],
)
def test_an_unknown_verb_is_answered_with_the_nearest_ones(typed: str, meant: str) -> None:
    ended = CliRunner().invoke(cli, [typed], prog_name="furrow")
    assert ended.exit_code == 2 and f"No such command '{typed}'." in ended.output
    assert ("Did you mean" in ended.output) is bool(meant) and meant in ended.output
