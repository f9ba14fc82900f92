"""What is generated from the table of forms: the families whose calls are understood."""

from __future__ import annotations

from api.chat.reading.form import Form
from api.chat.reading.table import TABLE, rows
from api.chat.reading.writing import written_calls


def table() -> str:
    """The forms in docs/tools.md."""
    lines = ["| format | models | a call, ⏎ is a line break | reasoning |\n", "|---|---|---|---|\n"]
    for name, row in sorted(rows().items()):
        form = TABLE[name]
        lines.append(f"| `{name}` | {row.models} | {_call(form)} | {_reasoning(form)} |\n")
    return "".join(lines)


def _call(form: Form) -> str:
    assert form.calls is not None
    return _code(written_calls(form.calls, [("f", {"city": "Oslo", "days": 2})]))


def _reasoning(form: Form) -> str:
    return ", ".join(_code(f"{pair.open}…{pair.close}") for pair in form.reasoning) or "–"


def _code(text: str) -> str:
    mark = "``" if "`" in text else "`"
    plain = text.replace("\n", "⏎").replace("|", "\\|")
    return f"{mark}{plain}{mark}" if mark == "`" else f"`` {plain} ``"
