"""What is generated from the table of external engines: what each can serve."""

from __future__ import annotations

from control.engines import ENGINES
from control.messages import GrammarKind

_KINDS: dict[GrammarKind, str] = {
    "json_schema": "JSON by a schema",
    "json_object": "JSON",
    "regex": "regular expressions",
    "choice": "one of several texts",
    "lark": "Lark grammars, calls in a family's own form",
}


def table() -> str:
    """The engines in docs/engines.md."""
    lines = ["| engine | tried | models | constrained answers | refused with a 400 that says why, as are images |\n"]
    lines.append("|---|---|---|---|---|\n")
    for engine in ENGINES.values():
        models = "GGUF files" if engine.gguf else "folders with safetensors"
        grammars = ", ".join(text for kind, text in _KINDS.items() if kind in engine.grammars)
        refused = ", ".join(f"`{field}`" for field in engine.refused)
        refused += f"; with a grammar {', '.join(f'`{name}`' for name in sorted(engine.not_with_grammar))}"
        name = f"`{engine.name}` ({engine.title})"
        lines.append(f"| {name} | {engine.tried} | {models} | {grammars} | {refused} |\n")
    return "".join(lines)
