"""The `furrow` command itself."""

from __future__ import annotations

from click.testing import CliRunner

from control.version import VERSION
from ops.cli import cli


def test_the_version_is_that_of_the_build() -> None:
    """As `furrow --version` has always printed it: scripts read it."""
    answer = CliRunner().invoke(cli, ["--version"], prog_name="furrow")
    assert (answer.exit_code, answer.output) == (0, f"furrow, version {VERSION}\n")
