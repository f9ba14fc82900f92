"""docs/compatibility.md, from what the clients did."""

from __future__ import annotations

from ops.compat.runs import Run

HEAD = """\
# Clients

Written by `python -m ops.compat run --write`, from runs of the real clients against a farm that serves the
demonstration model on two ranks. `python -m ops.compat install` puts each into an environment of its own, below the
folder that `FURROW_CLIENTS` names (else the user's cache); the acceptance tests run those that are installed and skip
the others. A gap is a check that fails and is known to: the run fails when it begins to work, so that this page stays
true.

How to set clients up is in [clients.md](clients.md), what the API serves in [api.md](api.md).
"""


def page(runs: list[Run]) -> str:
    """The whole page, for runs in the order of the registry."""
    lines = [HEAD, "| client | version | checks that work | known gaps |", "|---|---|---|---|"]
    for run in runs:
        verdicts = [result.verdict(run.client) for result in run.results]
        works = sum(verdict == "works" for verdict in verdicts)
        lines.append(f"| {run.client.title} | {run.version} | {works} of {len(verdicts)} | {verdicts.count('gap')} |")
    for run in runs:
        lines += ["", f"## {run.client.title}", ""]
        lines += [f"- {result.check}{_state(run, result.check)}" for result in run.results]
    return "\n".join(lines) + "\n"


def _state(run: Run, check: str) -> str:
    reason = run.client.gaps.get(check)
    return f": **gap**, {reason}" if reason is not None else ""
