"""The page docs/compatibility.md, generated from the results of the clients' runs."""

from __future__ import annotations

from ops.compat.runs import Run

HEAD = """\
# Client compatibility

`python -m ops.compat run --write` generates this page from runs of real clients against the demonstration model on two
ranks. `python -m ops.compat install` installs each client into its own environment, below `FURROW_CLIENTS` (else the
user's cache); the acceptance tests run the installed ones. [clients.md](clients.md) shows how to set clients up.

The script of a client in `ops/compat/scripts/` has its checks: answers whole and streamed, errors as the client's
exceptions, structured output, two turns and a tool loop with default settings, and whatever else it offers. Most also
have an answer whose leader is stopped for 0.6 s or killed (`kill -9`) in its middle; the text must be unchanged. Coding
agents run with their default prompts on a model that takes orders, four of them also in the [forms](tools.md#forms) of
harmony, Mistral and GLM. Images, vectors and scores are no part of these runs.

A gap is a check that is known to fail; the run fails when it passes.
"""


def page(runs: list[Run]) -> str:
    """The whole page, for runs in the order of the registry."""
    lines = [HEAD, "| client | version | checks that work | gaps |", "|---|---|---|---|"]
    for run in runs:
        verdicts = [result.verdict(run.client) for result in run.results]
        works = sum(verdict == "works" for verdict in verdicts)
        gaps = "; ".join(f"{check}: {reason}" for check, reason in run.client.gaps.items()) or "–"
        lines.append(f"| {run.client.title} | {run.version} | {works} of {len(verdicts)} | {gaps} |")
    return "\n".join(lines) + "\n"
