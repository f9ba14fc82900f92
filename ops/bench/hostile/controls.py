"""API processes with one mechanism switched off, whose figures must miss their limits.

`kinds` are the figures that then must be missed.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from control.errors import FurrowError
from ops.common.sabotage import Sabotage
from ops.harness.figures import Figure, table

CONTROLS = {
    "no-turns": Sabotage(
        "all requests of the API process wait in one line, first come, first served",
        "api.http.middleware",
        """
in_turn = module.Admission.in_turn
module.Admission.in_turn = lambda admission, app, tenant_of: in_turn(admission, app, lambda scope: "")
""",
        ("burst-1600: first token p99, beyond quiet p50", "burst-1600: /health, maximum"),
    ),
    "no-leaving": Sabotage(
        "the API process does not ask whether a client is still there",
        "api.http.connection",
        """
module.Client.leave = lambda client: client.begin()
""",
        ("cut-32: steps for clients that had gone",),
    ),
    "no-confinement": Sabotage(
        "the API process renders all templates itself, without prices",
        "api.models.models",
        """
assert module._template("m", "", ()) is not None
module._template = lambda name, source, trusted: module.PlainTemplate(source)
""",
        ("model-files: gap between tokens, maximum", "model-files: /health, maximum"),
    ),
    "no-hesitation": Sabotage(
        "requests of a tenant whose clients leave at once are begun at once",
        "api.http.middleware",
        """
assert module.Departures.hesitation
module.Departures.hesitation = lambda departures, tenant: 0.0
""",
        ("cut-8: steps for clients that had gone",),
    ),
    "no-addresses": Sabotage(
        "connections of all addresses wait in one line",
        "api.http.connection",
        """
assert module.address_of
module.address_of = lambda peer: ""
""",
        ("burst-3200: /health, maximum",),
    ),
    "no-shared-look": Sabotage(
        "each waiting request is looked at by itself, twice a second",
        "api.generation.follow",
        """
assert module.PLACES > 1 and module._LONGEST_PATIENCE > 1
module.PLACES = module._LONGEST_PATIENCE = 1
module._LOOKS_A_TICK = 1_000_000
""",
        ("wait-4000: share of a core for waiting streams",),
    ),
}


class NotMissed(FurrowError):
    """A control did no harm."""


def rows_of(control: Sabotage) -> list[str]:
    """The rows whose figures must be missed."""
    return sorted({figure.partition(":")[0] for figure in control.kinds})


def judge(control: Sabotage, figures: Sequence[Figure]) -> None:
    """Print the table. Raises NotMissed where a figure holds that must be missed, or is not there."""
    click.echo(table(figures))
    missed = {figure.name for figure in figures if not figure.holds}
    if held := [name for name in control.kinds if name not in missed]:
        raise NotMissed(f"{', '.join(held)}: not missed although {control.what}; the row does not find such harm")
    click.echo(f"as expected: {', '.join(control.kinds)}: missed, because {control.what}")
