"""The chat template of a model's files: one text, of several templates too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WITH_TOOLS = "additional_chat_templates/tool_use.jinja"
"""A folder's template for requests with tools."""


def chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """chat_template.jinja first, then the template inside tokenizer_config.json. Of several the one named `tool_use` is
    for requests with tools, and `default` for others."""
    template = tokenizer_config.get("chat_template")
    named: dict[str, str] = {}
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    own = folder / "chat_template.jinja"
    if own.exists():
        template = own.read_text(encoding="utf-8")
    with_tools = folder / WITH_TOOLS
    tool_use = with_tools.read_text(encoding="utf-8") if with_tools.exists() else named.get("tool_use")
    return template if tool_use is None else joined_templates(template, tool_use)


def joined_templates(default: str | None, tool_use: str) -> str:
    """One template that is `tool_use` where there are tools, and `default` elsewhere, as transformers chooses."""
    if default is None:
        return tool_use
    # A line break at a template's end is not rendered, and one after a block's mark is, with +.
    other = default.removesuffix("\n")
    with_tools = tool_use.removesuffix("\n")
    return f"{{%+ if tools +%}}{with_tools}{{%+ else +%}}{other}{{%+ endif %}}"
