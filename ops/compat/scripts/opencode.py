"""opencode, told of the server by a provider in its project's configuration."""

from __future__ import annotations

import json
from pathlib import Path

from checks import MODEL, SCRIPTED_URL
from coding_agent import BIN, ENDS, Agent, coding_agent

PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "Furrow",
    "options": {"baseURL": SCRIPTED_URL},
    "models": {MODEL: {"name": MODEL}},
}


def prepare(folder: Path) -> Agent:
    agent = Agent(folder, OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_AUTOUPDATE="1")
    settings = {"model": f"furrow/{MODEL}", "provider": {"furrow": PROVIDER}}
    (agent.project / "opencode.json").write_text(json.dumps(settings))
    return agent


def ask(agent: Agent, text: str, again: bool) -> str:
    return agent.run(BIN / "opencode", "run", *(["--continue"] if again else []), text)


WRITE = {"name": "bash", "arguments": {"command": "echo hello > made.txt", "description": "Write a file"}}
coding_agent(prepare, ask, {"call": WRITE, "then": ENDS}, "made.txt")
