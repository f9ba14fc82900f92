"""Qwen Code, told of the server by OpenAI's environment variables."""

from __future__ import annotations

import json
from pathlib import Path

from checks import KEY, MODEL, SCRIPTED_URL
from coding_agent import BIN, ENDS, Agent, coding_agent


def prepare(folder: Path) -> Agent:
    """Without the proxy that is not there: it would be asked for loopback too. Its settings send nothing home."""
    proxies = {"HTTP_PROXY": "", "HTTPS_PROXY": ""}
    agent = Agent(folder, OPENAI_BASE_URL=SCRIPTED_URL, OPENAI_API_KEY=KEY, OPENAI_MODEL=MODEL, **proxies)
    settings = {"privacy": {"usageStatisticsEnabled": False}, "general": {"disableAutoUpdate": True}}
    (agent.home / ".qwen").mkdir()
    (agent.home / ".qwen" / "settings.json").write_text(json.dumps(settings))
    return agent


def ask(agent: Agent, text: str, again: bool) -> str:
    turn = ["--continue"] if again else []
    said = agent.run(BIN / "qwen", *turn, "--auth-type", "openai", "--yolo", "--output-format", "json", "-p", text)
    return next(event["result"] for event in json.loads(said) if event["type"] == "result")


WRITE = {
    "name": "run_shell_command",
    "arguments": {"command": "echo hello > made.txt", "description": "Write a file", "is_background": False},
}
coding_agent(prepare, ask, {"call": WRITE, "then": ENDS}, "made.txt")
