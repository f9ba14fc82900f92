"""The page docs/compatibility.md, generated from the results of the clients' runs."""

from __future__ import annotations

from ops.compat.runs import Result, Run

HEAD = """\
# Client compatibility

`python -m ops.compat run --write` generates this page from runs of real clients against the demonstration model on two
ranks. `python -m ops.compat install` installs each client into its own environment, below `FURROW_CLIENTS` (else the
user's cache); the acceptance tests run the installed ones. A gap is a check that is known to fail; the run fails when
it passes.

- *Stopped leader*, *killed leader*: an answer is unchanged although its leader is stopped for 0.6 s, or killed, in its
  middle.
- *Tool loop*: the answers are sent back as the client made them. Coding agents run with their default prompts on a
  model that takes orders. A check that begins with a [form](tools.md#forms) is the loop in this form.

Images, vectors and scores take other models and are no part of these runs. [clients.md](clients.md) shows how to set
clients up.
"""


def page(runs: list[Run]) -> str:
    """The whole page, for runs in the order of the registry."""
    lines = [HEAD, "| client | version | checks that work | known gaps |", "|---|---|---|---|"]
    for run in runs:
        verdicts = [result.verdict(run.client) for result in run.results]
        works = sum(verdict == "works" for verdict in verdicts)
        lines.append(f"| {run.client.title} | {run.version} | {works} of {len(verdicts)} | {verdicts.count('gap')} |")
    for run in runs:
        lines += ["", f"## {run.client.title}", "", *_checks(run)]
    return "\n".join(lines) + "\n"


def _checks(run: Run) -> list[str]:
    """The checks in one line, then a line for each gap. Working tests of a client's own suite are only counted."""
    shown = [result.check for result in run.results if not _is_upstream(run, result)]
    upstream = len(run.results) - len(shown)
    others = [check for check in shown if check not in run.client.gaps]
    if upstream:
        others.append(f"{upstream} other tests of that suite")
    gaps = [f"- {check}: **gap**, {run.client.gaps[check]}" for check in shown if check in run.client.gaps]
    return ["; ".join(others), *(["", *gaps] if gaps else [])]


def _is_upstream(run: Run, result: Result) -> bool:
    return result.check.startswith("test_") and result.verdict(run.client) == "works"
