"""guidellm: its chat, completions and responses backends on a few synthetic requests of two turns each."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import BASE_URL, FAULT_URL, MODEL, check, main
from disturbed_program import run_disturbed

TOKENIZER = Path(__file__).parents[2] / "demo" / "model"
REQUESTS = 4
TOKENS = 64


def measured(form: str, fault: str = "") -> dict[str, Any]:
    """The only benchmark of a run that ends by itself; with `fault` while a request of it runs."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={BASE_URL},model={MODEL},request_format=/v1/{form}"]
        command += ["--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += ["--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS},turns=2"]
        command += ["--tokenizer", f"kind=hf_auto,model={TOKENIZER}", "--output", f"kind=json,path={report}"]
        run_disturbed(command, folder, fault)
        [found] = json.loads(report.read_text())["benchmarks"]
        return found


def whole(found: dict[str, Any]) -> None:
    """Every request was answered, with as many tokens as it asked for."""
    requests = found["requests"]
    assert not requests["errored"] and not requests["incomplete"], str(requests["errored"])[:250]
    assert len(requests["successful"]) == REQUESTS, len(requests["successful"])
    assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {TOKENS}


for form in ("chat/completions", "completions", "responses"):

    @check(f"{form}: {REQUESTS} requests of two turns")
    def run(form: str = form) -> None:
        whole(measured(form))


if FAULT_URL:

    @check("chat/completions: killed leader")
    def killed() -> None:
        whole(measured("chat/completions", "kill?busy"))


main()
