"""`python -m ops.bench`: the same as `furrow bench`."""

from __future__ import annotations

import importlib
import os
import sys

import click

from control import logs
from control.errors import FurrowError

VERBS = {
    "load": ("ops.bench.load.load", "Load scenarios through the HTTP API."),
    "compare": ("ops.bench.peers.compare", "Furrow beside its peers, on the same weights."),
    "overhead": ("ops.bench.peers.overhead", "The whole farm beside the bare engine loop, and what it asks of Redis."),
    "startup": ("ops.bench.load.startup", "From `furrow serve` to the first token, phase by phase."),
    "decode": ("ops.bench.engine.decode", "The engine alone, beside transformers' generate."),
    "native": ("ops.bench.engine.native", "The forward in C++ beside torch's."),
    "linears": ("ops.bench.engine.linears", "Every kernel for a linear layer, beside each other."),
    "grammars": ("ops.bench.engine.grammars", "What constrained answers cost a step."),
    "collectives": ("ops.bench.engine.collectives", "What an exchange between CPU ranks on one host takes."),
    "ranks": ("ops.bench.engine.ranks", "A model on several CPU ranks beside the same on one."),
    "control": ("ops.bench.control.control", "What Redis adds to a step."),
    "prefix": (
        "ops.bench.load.prefix",
        "The second turn of a conversation beside its first: the time to the first token.",
    ),
    "rolling": ("ops.bench.recovery.rolling", "Models reloaded under load: nothing failed, truncated or changed."),
    "recovery": ("ops.bench.recovery.recovery", "Ranks killed under load: the time to the next token."),
    "hang": ("ops.bench.recovery.hang", "Ranks stopped under load: the time until it is noticed."),
    "fairness": ("ops.bench.load.fairness", "One heavy user beside nine light ones: what each is served."),
    "cancel": ("ops.bench.load.cancel", "Requests cancelled under load: the time until the slot is free."),
    "fanout": (
        "ops.bench.fanout.fanout",
        "One API process on one core, many streams: tokens a second, lateness, memory.",
    ),
    "hostile": (
        "ops.bench.hostile.hostile",
        "Attacks on an API process beside polite streams: what they notice, memory, refusals.",
    ),
    "scale": (
        "ops.bench.scale.scale",
        "A million logged tokens, 100,000 waiting requests: each script's time, and a leader's death.",
    ),
    "overload": ("ops.bench.load.overload", "Ten times the load that the farm can carry: memory, waiting, refusals."),
}
"""Verb → module that holds it as an attribute, and the line that --help shows without importing it."""


class LazyGroup(click.Group):
    """Imports a verb only when it is used: `load` has no need of torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return getattr(importlib.import_module(VERBS[cmd_name][0]), cmd_name) if cmd_name in VERBS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure a farm under load, and the engine beside transformers' own."""


def main() -> None:
    """A FurrowError becomes one clear line and exit status 1."""
    logs.configure("auto", "warning")
    # As an agent sets it for its ranks; read when torch is loaded, which the verbs do.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        bench.main(prog_name="furrow bench")
    except FurrowError as error:
        click.echo(f"furrow bench: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
