"""Coding agents on the scripted model: a tool call, a second turn, an answer whose leader is killed.

An agent keeps its home, its configuration and its project in one temporary folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checks import CLIENT, KEY, MODEL, ORDERED, SCRIPTED_URL, check, main, order

BIN = Path(os.environ["COMPAT_BIN"])
"""The folder of the client's programs."""
LIMIT_S = 90.0
ENDS = "The file is written."
LONG = " ".join(f"line {number}" for number in range(80))
COMMAND = "echo hello > made.txt"


def _claude_code(output: str) -> str:
    return json.loads(output)["result"]


def _codex(output: str) -> str:
    items = [event.get("item", {}) for event in map(json.loads, filter(None, output.splitlines()))]
    return "\n".join(item["text"] for item in items if item.get("type") == "agent_message")


def _qwen_code(output: str) -> str:
    return next(event["result"] for event in json.loads(output) if event["type"] == "result")


@dataclass(frozen=True)
class Agent:
    """The settings and commands by which an agent uses the server. `write` is the order to write "hello" into the
    file `file`."""

    command: tuple[str, ...]
    """Before the text of a turn."""
    again: tuple[str, ...]
    """The command that continues the last conversation."""
    write: dict[str, Any]
    file: str = "made.txt"
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Of its configuration: path in the folder of `home` and `project` → content."""
    before: tuple[tuple[str, ...], ...] = ()
    """Commands that prepare its project."""
    text: Callable[[str], str] = str
    """The last text of the agent, from its output."""


def _call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"call": {"name": tool, "arguments": arguments}, "then": ENDS}


CODEX_CONFIGURATION = f"""\
model = "{MODEL}"
model_provider = "furrow"

[model_providers.furrow]
name = "Furrow"
base_url = "{SCRIPTED_URL}"
wire_api = "responses"
"""
OPENCODE_PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "Furrow",
    "options": {"baseURL": SCRIPTED_URL},
    "models": {MODEL: {"name": MODEL}},
}
QWEN_SETTINGS = {"privacy": {"usageStatisticsEnabled": False}, "general": {"disableAutoUpdate": True}}
AIDER = ("aider", "--model", f"openai/{MODEL}", "--yes-always", "--no-check-update", "--analytics-disable")
CLAUDE = ("claude", "--output-format", "json", "--allowedTools=Bash")
CODEX = ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json")
QWEN = ("qwen", "--auth-type", "openai", "--yolo", "--output-format", "json")
AGENTS = {
    # It has no tools: a model's answer contains the files.
    "aider": Agent(
        command=(*AIDER, "--no-show-model-warnings", "--message"),
        again=(*AIDER, "--no-show-model-warnings", "--restore-chat-history", "--message"),
        write={"say": f"{ENDS}\n\nmade.py\n```\nprint('hello')\n```\n"},
        file="made.py",
        environment={"OPENAI_API_BASE": SCRIPTED_URL, "OPENAI_API_KEY": KEY},
        before=(
            ("git", "init", "--quiet", "."),
            ("git", "config", "user.name", "compat"),
            ("git", "config", "user.email", "compat"),
        ),
    ),
    "claude-code": Agent(
        command=(*CLAUDE, "-p"),
        again=(*CLAUDE, "--continue", "-p"),
        write=_call("Bash", command=COMMAND, description="Write a file"),
        environment={
            "ANTHROPIC_BASE_URL": SCRIPTED_URL.removesuffix("/v1"),
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        text=_claude_code,
    ),
    # The sandbox needs rights that a container may not have, so it is off.
    "codex": Agent(
        command=CODEX,
        again=(*CODEX, "resume", "--last"),
        write=_call("exec_command", cmd=COMMAND),
        files={"home/.codex/config.toml": CODEX_CONFIGURATION},
        text=_codex,
    ),
    "opencode": Agent(
        command=("opencode", "run"),
        again=("opencode", "run", "--continue"),
        write=_call("bash", command=COMMAND, description="Write a file"),
        environment={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        files={
            "project/opencode.json": json.dumps(
                {"model": f"furrow/{MODEL}", "provider": {"furrow": OPENCODE_PROVIDER}}
            ),
        },
    ),
    # Without the proxy that is not there: it would be asked for loopback too. Its settings send nothing home.
    "qwen-code": Agent(
        command=(*QWEN, "-p"),
        again=(*QWEN, "--continue", "-p"),
        write=_call("run_shell_command", command=COMMAND, description="Write a file", is_background=False),
        environment={
            "OPENAI_BASE_URL": SCRIPTED_URL,
            "OPENAI_API_KEY": KEY,
            "OPENAI_MODEL": MODEL,
            "HTTP_PROXY": "",
            "HTTPS_PROXY": "",
        },
        files={"home/.qwen/settings.json": json.dumps(QWEN_SETTINGS)},
        text=_qwen_code,
    ),
}
AGENT = AGENTS[CLIENT]


class AgentProject:
    """An agent in a folder; `project` is the working directory of every call."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "project"
        home = folder / "home"
        for directory in (home, self.project):
            directory.mkdir()
        for path, content in AGENT.files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(content)
        inherited = {
            name: os.environ[name]
            for name in ("PATH", "LANG", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
            if name in os.environ
        }
        self._environment = inherited | {"HOME": str(home), "TERM": "dumb"} | AGENT.environment
        for command in AGENT.before:
            self._run(command)

    def ask(self, text: str, *, again: bool = False) -> str:
        """The last text of the agent in its answer to a turn, of a new conversation or of the last one."""
        program, *words = AGENT.again if again else AGENT.command
        return AGENT.text(self._run((str(BIN / program), *words, text)))

    def _run(self, command: tuple[str, ...]) -> str:
        """The standard output. Raises AssertionError with the program's last words where it fails or takes too long."""
        settings = {"cwd": self.project, "env": self._environment, "timeout": LIMIT_S}
        try:
            process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **settings)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"no end within {LIMIT_S:g} s: {str(error.stdout or error.stderr)[-200:]}") from error
        assert process.returncode == 0, (process.stderr + process.stdout)[-280:]
        return process.stdout


@contextmanager
def prepared() -> Iterator[AgentProject]:
    assert SCRIPTED_URL, "it needs the farm whose model takes orders"
    with tempfile.TemporaryDirectory(prefix="furrow-agent-") as folder:
        yield AgentProject(Path(folder))


@check(ORDERED)
def two_turns() -> None:
    with prepared() as agent:
        answer = agent.ask(f"Please write the file. {order(**AGENT.write)}")
        assert ENDS in answer, f"the end is {answer[-200:]!r}"
        content = (agent.project / AGENT.file).read_text()
        assert "hello" in content, f"{AGENT.file} has {content!r}"
        answer = agent.ask(f"Thanks. {order(say='You are welcome.')}", again=True)
        assert "You are welcome." in answer, f"the second turn is {answer[-200:]!r}"


@check("an answer whose leader is killed in the middle")
def killed() -> None:
    with prepared() as agent:
        answer = agent.ask(f"Count lines. {order(say=LONG, dies=True)}")
        assert LONG in " ".join(answer.split()), f"{answer[-200:]!r} is the whole text"


main()
