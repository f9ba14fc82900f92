"""Claude Code, told of the server by its documented environment variables."""

from __future__ import annotations

import json
from pathlib import Path

from checks import KEY, MODEL, SCRIPTED_URL
from coding_agent import BIN, ENDS, Agent, coding_agent


def prepare(folder: Path) -> Agent:
    return Agent(
        folder,
        ANTHROPIC_BASE_URL=SCRIPTED_URL.removesuffix("/v1"),
        ANTHROPIC_AUTH_TOKEN=KEY,
        ANTHROPIC_MODEL=MODEL,
        ANTHROPIC_SMALL_FAST_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )


def ask(agent: Agent, text: str, again: bool) -> str:
    turn = ["--continue"] if again else []
    said = agent.run(BIN / "claude", *turn, "-p", text, "--output-format", "json", "--allowedTools", "Bash")
    return json.loads(said)["result"]


WRITE = {"name": "Bash", "arguments": {"command": "echo hello > made.txt", "description": "Write a file"}}
coding_agent(prepare, ask, {"call": WRITE, "then": ENDS}, "made.txt")
