"""Codex, told of the server by its own configuration file."""

from __future__ import annotations

import json
from pathlib import Path

from checks import MODEL, SCRIPTED_URL
from coding_agent import BIN, ENDS, Agent, coding_agent

CONFIGURATION = f"""\
model = "{MODEL}"
model_provider = "furrow"

[model_providers.furrow]
name = "Furrow"
base_url = "{SCRIPTED_URL}"
wire_api = "responses"
"""


def prepare(folder: Path) -> Agent:
    agent = Agent(folder)
    (agent.home / ".codex").mkdir()
    (agent.home / ".codex" / "config.toml").write_text(CONFIGURATION)
    return agent


def ask(agent: Agent, text: str, again: bool) -> str:
    """The sandbox needs rights that a container may not have, so it is off."""
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    said = agent.run(BIN / "codex", "exec", *options, *(["resume", "--last"] if again else []), text)
    items = [event.get("item", {}) for event in map(json.loads, filter(None, said.splitlines()))]
    return "\n".join(item["text"] for item in items if item.get("type") == "agent_message")


WRITE = {"name": "exec_command", "arguments": {"cmd": "echo hello > made.txt"}}
coding_agent(prepare, ask, {"call": WRITE, "then": ENDS}, "made.txt")
