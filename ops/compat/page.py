"""The page docs/compatibility.md, generated from the results of the clients' runs."""

from __future__ import annotations

from ops.compat.runs import Result, Run

HEAD = """\
# Client compatibility

`python -m ops.compat run --write` generates this page from runs of real clients against the demonstration model on two
ranks. `python -m ops.compat install` installs each client into its own environment, below `FURROW_CLIENTS` (else the
user's cache); the acceptance tests run the installed ones. A gap is a check that is known to fail; the run fails when
it passes. In the checks *stopped leader* and *killed leader* an answer must be unchanged although its leader is stopped
for 0.6 s, or killed (`kill -9`), in its middle. A *tool loop* sends the answers back as the client made them.

Coding agents run with their default prompts and tools on a model that takes orders in its prompt, behind the real API.
Its leader's process is killed (`kill -9`) in the middle of an answer. A check that begins with the name of a
[form](tools.md#forms) is the agent's tool loop on a model that writes calls and reasoning in this form, with its marks
as tokens.

The demonstration model takes text and gives text. Images (`image_url`, `input_image`, `image`), vectors
(`/v1/embeddings`, `/v2/embed`) and scores (`/v1/rerank`, `/score`) take other models, and are no part of these runs;
[coverage.md](coverage.md) names their tests.

[clients.md](clients.md) shows how to set clients up, [api.md](api.md) the API.
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
    """One line per check; the tests of a client's own suite that work share one line."""
    shown = [result.check for result in run.results if not _is_upstream(run, result)]
    upstream = len(run.results) - len(shown)
    lines = [f"- {check}{_state(run, check)}" for check in shown]
    return lines + ([f"- {upstream} other tests of that suite"] if upstream else [])


def _is_upstream(run: Run, result: Result) -> bool:
    return result.check.startswith("test_") and result.verdict(run.client) == "works"


def _state(run: Run, check: str) -> str:
    reason = run.client.gaps.get(check)
    return f": **gap**, {reason}" if reason is not None else ""
