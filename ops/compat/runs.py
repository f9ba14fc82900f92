"""One client put to work on a running farm: its checks, each with what came of it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ops.compat import environments
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
class Result:
    """A check of a script; `detail` says why it failed."""

    check: str
    ok: bool
    detail: str = ""

    def verdict(self, client: Client) -> Verdict:
        if self.check in client.gaps:
            return "closed" if self.ok else "gap"
        return "works" if self.ok else "broken"


@dataclass(frozen=True, slots=True)
class Run:
    client: Client
    version: str
    results: list[Result]

    @property
    def faults(self) -> list[str]:
        """Contradictions of the list of gaps: failures that are not on it, and gaps that do not fail."""
        found = [
            f"{result.check}: {result.detail if verdict == 'broken' else 'is listed as a gap, and works'}"
            for result in self.results
            if (verdict := result.verdict(self.client)) in ("broken", "closed")
        ]
        seen = {result.check for result in self.results}
        return found + [f"{gap}: is listed as a gap, and was not tried" for gap in self.client.gaps if gap not in seen]


def run(
    client: Client,
    base_url: str,
    model: str,
    *,
    samples: Path | None = None,
    fault_url: str = "",
    scripted_url: str = "",
    form: str = "",
) -> Run:
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
        "COMPAT_SAMPLES": str(samples or ""),
        "COMPAT_FAULT_URL": fault_url,
        "COMPAT_SCRIPTED_URL": scripted_url,
        "COMPAT_FORM": form,
        "COMPAT_BIN": str(environments.programs(client)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "ANTHROPIC_", "OLLAMA_", "PYTHON"))
    }
    try:
        done = subprocess.run(
            environments.command(client),
            capture_output=True,
            text=True,
            timeout=RUN_LIMIT_S,
            env=kept | settings | LOOPBACK_ONLY,
        )
        results = [Result(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"check"')]
        if done.returncode != 0 or not results:
            results.append(Result("the script ran to its end", False, (done.stderr or done.stdout)[-1500:]))
    except subprocess.TimeoutExpired:
        results = [Result("the script ran to its end", False, f"it took more than {RUN_LIMIT_S:g} s")]
    return Run(client, environments.version(client) or "?", results)
