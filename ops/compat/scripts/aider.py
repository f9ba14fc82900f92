"""aider, told of the server by OpenAI's environment variables. It has no tools: a model's answer contains the files."""

from __future__ import annotations

from pathlib import Path

from checks import KEY, MODEL, SCRIPTED_URL
from coding_agent import BIN, ENDS, Agent, coding_agent

OPTIONS = ("--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings")


def prepare(folder: Path) -> Agent:
    agent = Agent(folder, OPENAI_API_BASE=SCRIPTED_URL, OPENAI_API_KEY=KEY)
    agent.run("git", "init", "--quiet", ".")
    for name in ("user.name", "user.email"):
        agent.run("git", "config", name, "compat")
    return agent


def ask(agent: Agent, text: str, again: bool) -> str:
    turn = ["--restore-chat-history"] if again else []
    return agent.run(BIN / "aider", "--model", f"openai/{MODEL}", *OPTIONS, *turn, "--message", text)


coding_agent(prepare, ask, {"say": f"{ENDS}\n\nmade.py\n```\nprint('hello')\n```\n"}, "made.py")
