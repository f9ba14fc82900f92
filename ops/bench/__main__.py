"""The command `furrow bench`."""

from __future__ import annotations

import importlib

import click

from ops.bench import program

VERBS = {
    "load": ("ops.bench.load.load", "Run load scenarios through the HTTP API."),
    "compare": ("ops.bench.peers.compare", "Compare Furrow with other engines on the same weights."),
    "scale": (
        "ops.bench.scale.scale",
        "Time Redis scripts with a million log entries and 100,000 waiting requests.",
    ),
    "recovery": ("ops.bench.recovery.recovery", "Kill ranks under load and time the next token."),
    "fairness": ("ops.bench.load.fairness", "Measure each user's share beside one user with a heavy load."),
    "hostile": ("ops.bench.hostile.hostile", "Attack an API process and measure delays, memory and refusals."),
}
"""Verb → its module, which has an attribute of that name, and the line that --help shows without importing it."""


class LazyGroup(click.Group):
    """A group that imports a verb when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return getattr(importlib.import_module(VERBS[cmd_name][0]), cmd_name) if cmd_name in VERBS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure a farm under load.

    docs/performance.md lists benchmarks of single parts, which run by `python -m ops.bench.ROOM.NAME`.
    """


if __name__ == "__main__":
    program.run(bench, "furrow bench")
