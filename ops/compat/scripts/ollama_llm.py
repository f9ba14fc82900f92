"""Simon Willison's `llm` with its plugin for Ollama, which finds the models by itself."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from checks import BASE_URL, KEY, MODEL, check, main
from llm_program import Program


def prepare(folder: Path) -> dict[str, str]:
    return {"OLLAMA_HOST": BASE_URL.removesuffix("/v1"), "OLLAMA_API_KEY": KEY}


program = Program(prepare, f"ollama/{MODEL}", "num_predict")


@check("models, found by the plugin")
def models() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _, environment = program.command(folder)
        assert f"ollama/{MODEL}" in program.run([sys.executable, "-m", "llm", "models"], environment)


program.add_checks()


@check("a schema")
def structured() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert program.ask(folder, "--schema", "healthy bool", "Is the replica healthy?", limit=200).startswith("{")


main()
