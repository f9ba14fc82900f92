"""Simon Willison's `llm`, told of the server by its own file of models."""

from __future__ import annotations

from pathlib import Path

from checks import BASE_URL, KEY, MODEL, main
from llm_program import Program

FILE = f"""\
- model_id: farm
  model_name: {MODEL}
  api_base: {BASE_URL}
  can_stream: true
"""


def prepare(folder: Path) -> dict[str, str]:
    (folder / "extra-openai-models.yaml").write_text(FILE)
    return {"OPENAI_API_KEY": KEY}


Program(prepare, "farm", "max_tokens").add_checks()
main()
