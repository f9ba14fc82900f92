"""Shared by the tests of tools: a template that takes tools, as Qwen's does, and tools to offer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.byte_model import byte_assets
from tests.leader import ScriptedLeader
from tests.servers import Server

TEMPLATE = """\
{%- if tools %}{{- '<tools>' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}{{- '</tools>\\n' }}{% endif %}
{%- for message in messages %}
{{- message.role + ': ' }}
{%- if message.role == 'tool' %}{{- '<tool_response>' + message.content + '</tool_response>' }}
{%- else %}{{- message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor %}
{{- '\\n' }}
{%- endfor %}
{{- 'assistant: ' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"""

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
ASK: list[Any] = [{"role": "user", "content": "How is it in Paris?"}]


@contextmanager
def leader_with_tools(server: Server) -> Iterator[ScriptedLeader]:
    """A leader whose model takes tools."""
    leader = ScriptedLeader(server.url, assets=byte_assets(chat_template=TEMPLATE))
    leader.start()
    try:
        yield leader
    finally:
        leader.stop()


def called(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
