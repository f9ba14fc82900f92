"""The command `furrow bench`."""

from __future__ import annotations

import click

from ops.common.groups import LazyGroup
from ops.harness.program import run

VERBS = {
    "load": ("ops.bench.load.load", "Run load scenarios through the HTTP API."),
    "compare": ("ops.bench.peers.compare", "Compare Furrow with other engines on the same weights."),
    "scale": (
        "ops.bench.scale.scale",
        "Time Redis scripts with a million log entries and 100,000 waiting requests.",
    ),
    "recovery": ("ops.bench.recovery.recovery", "Kill ranks under load and time the next token."),
    "fairness": ("ops.bench.load.fairness", "Measure each user's share beside one user with a heavy load."),
    "lookup": ("ops.bench.load.lookup", "Time answers that repeat their context, with and without prompt lookup."),
    "hostile": ("ops.bench.hostile.hostile", "Attack an API process and measure delays, memory and refusals."),
}


@click.group(cls=LazyGroup, verbs=VERBS, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure a farm under load.

    docs/performance.md lists benchmarks of single parts, which run by `python -m ops.bench.ROOM.NAME`.
    """


if __name__ == "__main__":
    run(bench, "furrow bench")
