"""The clients that are tried: what each is made of, which script drives it, what is known not to work; and where each
is installed, in a folder of its own, so that none meets another's dependencies."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from control.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """`gaps` maps a check of the script to the reason for which it fails today; one that works is no gap any more."""

    name: str
    title: str
    kind: Literal["python", "node"] = "python"
    packages: tuple[str, ...]
    """As pip or npm take them; the first one's version is the client's."""
    script: str
    gaps: dict[str, str] = field(default_factory=dict[str, str])
    orders: bool = False
    """True for an agent whose tool loop is run on the model that takes orders, in the forms of several families."""

    @property
    def package(self) -> str:
        """The name of the client's own package, without extras and version."""
        return re.sub(r"(?<=.)[@\[].*", "", self.packages[0])


CLIENTS: tuple[Client, ...] = (
    Client(
        name="openai-python",
        title="OpenAI SDK for Python",
        packages=("openai",),
        script="openai_python.py",
    ),
    Client(
        name="openai-node",
        title="OpenAI SDK for Node",
        kind="node",
        packages=("openai",),
        script="openai_node.mjs",
    ),
    Client(
        name="anthropic-python",
        title="Anthropic SDK for Python",
        packages=("anthropic",),
        script="anthropic_python.py",
    ),
    Client(
        name="anthropic-node",
        title="Anthropic SDK for Node",
        kind="node",
        packages=("@anthropic-ai/sdk",),
        script="anthropic_node.mjs",
    ),
    Client(
        name="langchain",
        title="LangChain's standard tests, with `ChatOpenAI`",
        packages=("langchain-openai", "langchain-tests"),
        script="langchain_python.py",
        gaps={
            "test_json_mode": "the demonstration model does not write the object that a prompt describes",
            "test_tool_calling_with_no_arguments": "the demonstration model calls it more than once",
            "test_unicode_tool_call_integration": "the demonstration model writes no Chinese",
        },
    ),
    Client(
        name="litellm",
        title="litellm",
        packages=("litellm", "mcp"),
        script="litellm_python.py",
    ),
    Client(
        name="litellm-proxy",
        title="litellm's proxy",
        packages=("litellm[proxy]", "anthropic"),
        script="litellm_proxy.py",
    ),
    Client(
        name="openai-agents",
        title="OpenAI Agents SDK",
        packages=("openai-agents",),
        script="openai_agents.py",
        orders=True,
    ),
    Client(
        name="open-responses",
        title="Open Responses' acceptance tests, with `openresponses-types`",
        packages=("openresponses-types", "httpx"),
        script="open_responses.py",
        gaps={
            "Image Input": "the demonstration model takes text only",
        },
    ),
    Client(
        name="pydantic-ai",
        title="pydantic-ai",
        packages=("pydantic-ai-slim[openai]",),
        script="pydantic_ai_python.py",
    ),
    Client(
        name="instructor",
        title="instructor",
        packages=("instructor",),
        script="instructor_python.py",
    ),
    Client(
        name="vercel",
        title="Vercel AI SDK",
        kind="node",
        packages=("ai", "@ai-sdk/openai-compatible", "zod"),
        script="vercel.mjs",
    ),
    Client(
        name="llama-index",
        title="LlamaIndex, `OpenAILike`",
        packages=("llama-index-llms-openai-like",),
        script="llama_index_python.py",
    ),
    Client(name="llm", title="`llm`", packages=("llm",), script="llm_program.py"),
    Client(name="ollama-python", title="Ollama's client for Python", packages=("ollama",), script="ollama_python.py"),
    Client(
        name="ollama-node",
        title="Ollama's client for JavaScript",
        kind="node",
        packages=("ollama",),
        script="ollama_node.mjs",
    ),
    Client(
        name="langchain-ollama",
        title="LangChain, `ChatOllama`",
        packages=("langchain-ollama",),
        script="ollama_langchain.py",
    ),
    Client(name="llm-ollama", title="`llm-ollama`", packages=("llm-ollama", "llm"), script="llm_program.py"),
    Client(
        name="lm-eval",
        title="lm-evaluation-harness, `local-completions`",
        packages=("lm-eval[api]",),
        script="lm_eval_scores.py",
    ),
    Client(
        name="claude-code",
        title="Claude Code",
        kind="node",
        packages=("@anthropic-ai/claude-code@latest",),
        script="coding_agents.py",
        orders=True,
    ),
    Client(
        name="codex", title="Codex", kind="node", packages=("@openai/codex",), script="coding_agents.py", orders=True
    ),
    Client(
        name="opencode",
        title="opencode",
        kind="node",
        packages=("opencode-ai",),
        script="coding_agents.py",
        orders=True,
    ),
    Client(
        name="qwen-code",
        title="Qwen Code",
        kind="node",
        packages=("@qwen-code/qwen-code",),
        script="coding_agents.py",
        orders=True,
    ),
    Client(name="aider", title="aider", packages=("aider-chat",), script="coding_agents.py"),
    Client(name="guidellm", title="guidellm", packages=("guidellm",), script="load_generators.py"),
    Client(name="aiperf", title="aiperf", packages=("aiperf",), script="load_generators.py"),
)


def find_client(name: str) -> Client | None:
    return next((client for client in CLIENTS if client.name == name), None)


# --- environments -----------------------------------------------------------------------------------------------------


FOLDER = "FURROW_CLIENTS"
"""The environment variable that names the folder of all environments."""
_STAMP = "installed.json"
"""Written last: a folder without it is half an installation."""
INSTALL_LIMIT_S = 900.0
SCRIPTS = Path(__file__).parent / "scripts"


def root() -> Path:
    """FURROW_CLIENTS, or a folder in the user's cache."""
    directory = os.environ.get(FOLDER)
    if directory:
        return Path(directory)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "furrow" / "clients"


def folder(client: Client) -> Path:
    return root() / client.name


def version(client: Client) -> str | None:
    """Of the installed client; None where there is none."""
    stamp = folder(client) / _STAMP
    return json.loads(stamp.read_text())["version"] if stamp.is_file() else None


def missing(client: Client) -> str | None:
    """Why the client can't be run here; None where it can."""
    if version(client) is None:
        return f"{client.name} is not installed: python -m ops.compat install {client.name}"
    if client.kind == "node" and shutil.which("node") is None:
        return f"{client.name} needs node, which is not here"
    return None


def install(client: Client) -> str:
    """Make the client's environment anew; its version. Raises SettingsError with the installer's own words."""
    place = folder(client)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    version = _install_python(client, place) if client.kind == "python" else _install_node(client, place)
    (place / _STAMP).write_text(json.dumps({"version": version, "packages": client.packages}))
    return version


def command(client: Client) -> list[str]:
    """The command line of the client's script in its environment."""
    place = folder(client)
    if client.script.endswith(".py"):
        # A program of Node is driven by a script that needs no package.
        python = _python(place) if client.kind == "python" else sys.executable
        return [str(python), str(SCRIPTS / client.script)]
    # Node looks for packages beside the file that imports them.
    for script in SCRIPTS.glob("*.mjs"):
        shutil.copy(script, place)
    return ["node", str(place / client.script)]


def programs(client: Client) -> Path:
    """The folder of the programs that the client's packages bring."""
    return folder(client) / ("bin" if client.kind == "python" else "node_modules/.bin")


def _python(place: Path) -> Path:
    return place / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def _install_python(client: Client, place: Path) -> str:
    venv.create(place, with_pip=True)
    _run([str(_python(place)), "-m", "pip", "install", "--quiet", *client.packages])
    ask = f"import importlib.metadata as m; print(m.version({client.package!r}))"
    return _run([str(_python(place)), "-c", ask]).strip()


def _install_node(client: Client, place: Path) -> str:
    npm = shutil.which("npm")
    if npm is None:
        raise SettingsError(f"{client.name} needs npm, which is not here. Install Node.js 20 or newer.")
    _run([npm, "install", "--silent", "--no-save", "--prefix", str(place), *client.packages])
    return json.loads((place / "node_modules" / client.package / "package.json").read_text())["version"]


def _run(words: list[str]) -> str:
    process = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    if process.returncode != 0:
        raise SettingsError(f"{' '.join(words[:4])} … failed: {(process.stderr or process.stdout)[-800:]}")
    return process.stdout
