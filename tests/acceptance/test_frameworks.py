"""LangChain and pydantic-ai work over three APIs.

They have an environment of their own: `python -m venv X` and in it
`pip install langchain-openai langchain-anthropic 'pydantic-ai-slim[openai,anthropic]'`; FURROW_FRAMEWORKS=X/bin/python.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.byte_model import byte_assets
from tests.integration.api.calling import TEMPLATE, called
from tests.integration.api.conftest import running_api
from tests.leader import ScriptedLeader
from tests.servers import NEW, serving

PYTHON = os.environ.get("FURROW_FRAMEWORKS")
SCRIPT = Path(__file__).parent / "frameworks" / "ask.py"


def reply(prompt: str) -> str:
    """The answers of a model: a call, a sentence after its result, a form, reasoning."""
    last = prompt.rpartition("user: ")[2]
    if "<tool_response>" in last:
        return "It is cold."
    for begins, said in (
        ("call a tool", called("get_weather", '{"city": "Oslo"}')),
        ("json", '{"city": "Oslo"}'),
        ("think", "<think>Hm.</think>Done."),
    ):
        if last.startswith(begins):
            return said
    return "you said hello"


@pytest.mark.timeout(300)
@pytest.mark.skipif(PYTHON is None, reason="FURROW_FRAMEWORKS names no Python with LangChain and pydantic-ai")
def test_every_case_of_the_frameworks(tmp_path: Path) -> None:
    """Whole and streamed answers, calls of tools with their results, forms and thoughts, all through the frameworks."""
    assert PYTHON is not None
    with serving(NEW) as server:
        leader = ScriptedLeader(server.url, assets=byte_assets(chat_template=TEMPLATE))
        leader.reply = reply
        leader.start()
        try:
            with running_api(server.url, tmp_path) as api:
                process = subprocess.run(
                    [PYTHON, SCRIPT, api.url], capture_output=True, text=True, cwd=tmp_path, timeout=280
                )
                failed = [line for line in api.lines if line.get("action") == "http_error"]
        finally:
            leader.stop()
    records = [msgspec.json.decode(line) for line in process.stdout.splitlines()]
    assert process.returncode == 0 and len(records) >= 22, process.stderr[-2000:]
    assert [case for case in records if case["error"]] == []
    assert failed == []
