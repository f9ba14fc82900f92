"""The clients that are tried: what each is made of, which script drives it, and what is known not to work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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

    @property
    def package(self) -> str:
        """The name of the client's own package, without extras."""
        return self.packages[0].partition("[")[0]


_NO_TOOLS = "the demonstration model has not learnt to call tools; its template refuses them"

_LANGCHAIN_TOOLS = (
    "test_tool_calling[model0]",
    "test_tool_calling[model1]",
    "test_tool_calling_async",
    "test_bind_runnables_as_tools",
    "test_tool_message_histories_string_content",
    "test_tool_message_histories_list_content",
    "test_tool_choice",
    "test_tool_calling_with_no_arguments",
    "test_tool_message_error_status",
    "test_structured_few_shot_examples",
    "test_structured_output_pydantic_2_v1",
    "test_agent_loop[model0]",
    "test_agent_loop[model1]",
    "test_unicode_tool_call_integration",
)

CLIENTS: tuple[Client, ...] = (
    Client(
        name="openai-python",
        title="OpenAI SDK for Python",
        packages=("openai",),
        script="openai_python.py",
        gaps={
            "a tool that must be called, whole and streamed": _NO_TOOLS,
            "tools are offered, and results go back": _NO_TOOLS,
        },
    ),
    Client(
        name="openai-node",
        title="OpenAI SDK for Node",
        kind="node",
        packages=("openai",),
        script="openai_node.mjs",
        gaps={
            "a tool that must be called, whole and streamed": _NO_TOOLS,
        },
    ),
    Client(
        name="anthropic-python",
        title="Anthropic SDK for Python",
        packages=("anthropic",),
        script="anthropic_python.py",
        gaps={"a tool that must be called, and its result": _NO_TOOLS},
    ),
    Client(
        name="langchain",
        title="LangChain's standard tests, with `ChatOpenAI`",
        packages=("langchain-openai", "langchain-tests"),
        script="langchain_python.py",
        gaps={f"standard test {name}": _NO_TOOLS for name in _LANGCHAIN_TOOLS}
        | {"standard test test_json_mode": "the demonstration model does not write the object that a prompt describes"},
    ),
    Client(
        name="litellm",
        title="litellm",
        packages=("litellm", "mcp"),
        script="litellm_python.py",
        gaps={"a tool that must be called": _NO_TOOLS},
    ),
    Client(
        name="pydantic-ai",
        title="pydantic-ai",
        packages=("pydantic-ai-slim[openai]",),
        script="pydantic_ai_python.py",
        gaps={"output by a tool that must be called": _NO_TOOLS},
    ),
    Client(
        name="instructor",
        title="instructor",
        packages=("instructor",),
        script="instructor_python.py",
        gaps={"an object by a tool that must be called": _NO_TOOLS},
    ),
    Client(
        name="vercel",
        title="Vercel AI SDK",
        kind="node",
        packages=("ai", "@ai-sdk/openai-compatible", "zod"),
        script="vercel.mjs",
        gaps={"a tool that must be called": _NO_TOOLS},
    ),
    Client(
        name="llama-index",
        title="LlamaIndex, `OpenAILike`",
        packages=("llama-index-llms-openai-like",),
        script="llama_index_python.py",
        gaps={"an object by a tool that must be called": _NO_TOOLS},
    ),
    Client(name="llm", title="`llm`", packages=("llm",), script="llm_python.py"),
    Client(
        name="lm-eval",
        title="lm-evaluation-harness, `local-completions`",
        packages=("lm-eval[api]",),
        script="lm_eval_scores.py",
    ),
)


def client(name: str) -> Client | None:
    return next((known for known in CLIENTS if known.name == name), None)
