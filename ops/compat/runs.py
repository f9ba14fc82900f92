"""Clients put to work on a running farm: their checks with what came of each, measured scores beside transformers', and
the page docs/compatibility.md."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ops.demo
from ops.compat import clients
from ops.compat.clients import Client

RUN_LIMIT_S = 600.0
LOOPBACK_ONLY = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
"""A proxy that is not there, for programs that call home, and the switches of those that have one."""

Verdict = Literal["works", "gap", "broken", "closed"]
"""`gap`: it fails and is known to; `closed`: it is listed as a gap, and works."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A check of a script; `detail` says why it failed."""

    check: str
    ok: bool
    detail: str = ""

    def verdict(self, client: Client) -> Verdict:
        if self.check in client.gaps:
            return "closed" if self.ok else "gap"
        return "works" if self.ok else "broken"


@dataclass(frozen=True, slots=True)
class ClientRun:
    client: Client
    version: str
    results: list[CheckResult]

    @property
    def faults(self) -> list[str]:
        """Contradictions of the list of gaps: failures that are not on it, and gaps that do not fail."""
        faults = [
            f"{result.check}: {result.detail if verdict == 'broken' else 'is listed as a gap, and works'}"
            for result in self.results
            if (verdict := result.verdict(self.client)) in ("broken", "closed")
        ]
        checks = {result.check for result in self.results}
        return faults + [
            f"{gap}: is listed as a gap, and was not tried" for gap in self.client.gaps if gap not in checks
        ]


def run(
    client: Client,
    base_url: str,
    model: str,
    *,
    samples: Path | None = None,
    fault_url: str = "",
    scripted_url: str = "",
    form: str = "",
) -> ClientRun:
    """Run the client's script against `base_url` (with /v1); `samples` is where a script may leave what it measured.

    `fault_url` is that of `leader_faults`; without one the checks of disturbed streams are left out.
    At `scripted_url` (with /v1) the model answers by orders; coding agents need it. With `form`, that of its answers,
    an agent runs its tool loop on this model alone.

    A script that dies leaves its last words as the reason.
    """
    settings = {
        "COMPAT_BASE_URL": base_url,
        "COMPAT_MODEL": model,
        "COMPAT_KEY": "none",
        "COMPAT_CLIENT": client.name,
        "COMPAT_SAMPLES": str(samples or ""),
        "COMPAT_FAULT_URL": fault_url,
        "COMPAT_SCRIPTED_URL": scripted_url,
        "COMPAT_FORM": form,
        "COMPAT_BIN": str(clients.programs(client)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "ANTHROPIC_", "OLLAMA_", "PYTHON"))
    }
    try:
        process = subprocess.run(
            clients.command(client),
            capture_output=True,
            text=True,
            timeout=RUN_LIMIT_S,
            env=inherited | settings | LOOPBACK_ONLY,
        )
        results = [
            CheckResult(**json.loads(line)) for line in process.stdout.splitlines() if line.startswith('{"check"')
        ]
        if process.returncode != 0 or not results:
            results.append(CheckResult("the script ran to its end", False, (process.stderr or process.stdout)[-1500:]))
    except subprocess.TimeoutExpired:
        results = [CheckResult("the script ran to its end", False, f"it took more than {RUN_LIMIT_S:g} s")]
    return ClientRun(client, clients.version(client) or "?", results)


# --- scores -----------------------------------------------------------------------------------------------------------


CHECK = "log-likelihoods within 1e-3 of transformers'"
WITHIN = 1e-3
FOLDER = Path(ops.demo.__file__).parent / "model"


def judged(client: Client, run: Callable[[Path], ClientRun]) -> ClientRun:
    """`run` with a file for its samples; where it left some they are one check more."""
    with tempfile.TemporaryDirectory(prefix="furrow-compat-") as folder:
        samples = Path(folder) / "samples.json"
        client_run = run(samples)
        if samples.is_file():
            client_run.results.append(compared(json.loads(samples.read_text())))
    return client_run


def compared(samples: list[list[object]]) -> CheckResult:
    """`samples`: [context, continuation, the client's log-likelihood], as text, text and number."""
    if not samples:
        return CheckResult(CHECK, False, "there were none")
    reference = Reference()
    worst = 0.0
    example = ""
    for context, continuation, value in samples:
        away = abs(float(str(value)) - reference.log_likelihood(str(context), str(continuation)))
        if away >= worst:
            worst = away
            example = f"{str(context)[-40:]!r} + {continuation!r}"
    return CheckResult(CHECK, worst < WITHIN, f"{worst:.2g} apart at {example}")


class Reference:
    """transformers with the demonstration model, in float64."""

    def __init__(self) -> None:
        # Only here: whoever runs clients against a farm elsewhere has no need of them.
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM

        self._tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self._model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64)

    def log_likelihood(self, context: str, continuation: str) -> float:
        """Of the tokens that the whole text has more than its beginning."""
        import torch

        begun = len(self._tokenizer.encode(context, add_special_tokens=False).ids)
        tokens = self._tokenizer.encode(context + continuation, add_special_tokens=False).ids
        with torch.no_grad():
            logarithms = self._model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return float(sum(logarithms[at - 1, tokens[at]] for at in range(begun, len(tokens))))


# --- the page ---------------------------------------------------------------------------------------------------------


HEAD = """\
# Client compatibility

`python -m ops.compat run --write` generates this page from runs of real clients against the demonstration model on two
ranks. `python -m ops.compat install` installs each client into its own environment, below `FURROW_CLIENTS` (else the
user's cache). [clients.md](clients.md) shows how to set clients up.

The script of a client in `ops/compat/scripts/` has its checks: answers whole and streamed, errors as the client's
exceptions, structured output, a tool loop, and whatever else it offers. Most also have an answer whose leader is
stopped for 0.6 s or killed in its middle; the text must be unchanged. Coding agents run with their default prompts,
four of them also in the [forms](tools.md#forms) of harmony, Mistral and GLM. Images, vectors and scores are no part of
these runs.

A gap is a check that is known to fail; the run fails when it passes.
"""


def page(runs: list[ClientRun]) -> str:
    """The whole page, for runs in the order of the registry."""
    lines = [HEAD, "| client | version | checks that work | gaps |", "|---|---|---|---|"]
    for run in runs:
        verdicts = [result.verdict(run.client) for result in run.results]
        works = sum(verdict == "works" for verdict in verdicts)
        gaps = "; ".join(f"{check}: {reason}" for check, reason in run.client.gaps.items()) or "–"
        lines.append(f"| {run.client.title} | {run.version} | {works} of {len(verdicts)} | {gaps} |")
    return "\n".join(lines) + "\n"
