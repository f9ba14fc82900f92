"""aiperf: its chat, completions and responses endpoints on a few synthetic requests."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import BASE_URL, FAULT_URL, KEY, MODEL, check, main
from disturbed_program import run_disturbed

TOKENIZER = Path(__file__).parents[2] / "demo" / "model"
REQUESTS = 4
TOKENS = 64


def measured(kind: str, *options: str, fault: str = "") -> list[dict[str, Any]]:
    """The records of a run that ends by itself; with `fault` while a request of it runs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", MODEL, "--api-key", KEY]
        command += ["--url", BASE_URL.removesuffix("/v1"), "--endpoint-type", kind, "--streaming"]
        command += ["--tokenizer", str(TOKENIZER), "--isl", "32", "--osl", str(TOKENS)]
        command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
        command += ["--concurrency", "1", "--request-count", str(REQUESTS)]
        command += ["--artifact-dir", folder, "--ui", "none", "--no-gpu-telemetry", "--export-level", "records"]
        # Offline it would look for a tokenizer's folder among the downloaded ones.
        settings = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | {"HOME": folder}
        run_disturbed([*command, *options], folder, fault, settings)
        [records] = Path(folder).rglob("profile_export.jsonl")
        return [json.loads(line) for line in records.read_text().splitlines()]


def whole(records: list[dict[str, Any]]) -> None:
    """Every request was answered, with as many tokens as it asked for where aiperf reads the usage.

    It reads that of a response which is complete; one that ends at its limit is not.
    """
    assert len(records) == REQUESTS, records
    assert [record.get("error") for record in records] == [None] * REQUESTS, records
    assert all(record["metrics"]["request_latency"]["value"] > 0 for record in records), records
    told = [record["metrics"].get("output_sequence_length") for record in records]
    assert all(length is None or length["value"] == TOKENS for length in told), told


for kind in ("completions", "responses"):

    @check(f"{kind}: {REQUESTS} requests")
    def run(kind: str = kind) -> None:
        whole(measured(kind))


@check("chat: conversations of two turns, usage in every chunk")
def turns() -> None:
    whole(measured("chat", "--session-turns-mean", "2", "--per-chunk-usage"))


if FAULT_URL:

    @check("chat: killed leader")
    def killed() -> None:
        whole(measured("chat", fault="kill?busy"))


main()
