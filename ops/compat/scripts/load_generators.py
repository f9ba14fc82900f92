"""guidellm and aiperf: their chat, completions and responses endpoints on a few synthetic requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from checks import BASE_URL, CLIENT, FAULT_URL, KEY, MODEL, check, inject, main

TOKENIZER = Path(__file__).parents[2] / "demo" / "model"
PROGRAM = str(Path(sys.executable).with_name(CLIENT))
REQUESTS = 4
TOKENS = 64
LIMIT_S = 120.0


def run(words: list[str], folder: str, fault: str, settings: dict[str, str] | None = None) -> None:
    """Run the program in `folder` with the environment `settings` (None: this one's), and with `fault`, as `inject`
    takes it, while a request of it runs.

    Raises AssertionError with the program's last words where it fails, and TimeoutExpired.
    """
    disturbing = threading.Thread(target=inject, args=(fault,)) if fault else None
    with subprocess.Popen(
        [PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=settings
    ) as process:
        if disturbing:
            disturbing.start()
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    if disturbing:
        disturbing.join()
    assert process.returncode == 0, output[-280:]


def guidellm(form: str, fault: str = "") -> None:
    """Every request was answered, with as many tokens as it asked for."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["run", "--disable-console"]
        words += ["--backend", f"kind=openai_http,target={BASE_URL},model={MODEL},request_format=/v1/{form}"]
        words += ["--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}"]
        words += ["--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS},turns=2"]
        words += ["--tokenizer", f"kind=hf_auto,model={TOKENIZER}", "--output", f"kind=json,path={report}"]
        run(words, folder, fault)
        [benchmark] = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"] and not requests["incomplete"], str(requests["errored"])[:250]
    assert len(requests["successful"]) == REQUESTS, len(requests["successful"])
    assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {TOKENS}


def aiperf(kind: str, *options: str, fault: str = "") -> None:
    """Every request was answered, with as many tokens as it asked for where aiperf reads the usage.

    It reads that of a response which is complete; one that ends at its limit is not.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["profile", "--model", MODEL, "--api-key", KEY]
        words += ["--url", BASE_URL.removesuffix("/v1"), "--endpoint-type", kind, "--streaming"]
        words += ["--tokenizer", str(TOKENIZER), "--isl", "32", "--osl", str(TOKENS)]
        words += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
        words += ["--concurrency", "1", "--request-count", str(REQUESTS)]
        words += ["--artifact-dir", folder, "--ui", "none", "--no-gpu-telemetry", "--export-level", "records"]
        # Offline it would look for a tokenizer's folder among the downloaded ones.
        settings = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | {"HOME": folder}
        run([*words, *options], folder, fault, settings)
        [file] = Path(folder).rglob("profile_export.jsonl")
        records: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == REQUESTS, records
    assert [record.get("error") for record in records] == [None] * REQUESTS, records
    assert all(record["metrics"]["request_latency"]["value"] > 0 for record in records), records
    lengths = [record["metrics"].get("output_sequence_length") for record in records]
    assert all(length is None or length["value"] == TOKENS for length in lengths), lengths


if CLIENT == "guidellm":
    for form in ("chat/completions", "completions", "responses"):
        check(f"{form}: {REQUESTS} requests of two turns")(lambda form=form: guidellm(form))
    if FAULT_URL:
        check("chat/completions: killed leader")(lambda: guidellm("chat/completions", "kill?busy"))
else:
    for kind in ("completions", "responses"):
        check(f"{kind}: {REQUESTS} requests")(lambda kind=kind: aiperf(kind))
    check("chat: conversations of two turns, usage in every chunk")(
        lambda: aiperf("chat", "--session-turns-mean", "2", "--per-chunk-usage")
    )
    if FAULT_URL:
        check("chat: killed leader")(lambda: aiperf("chat", fault="kill?busy"))

main()
