"""What is generated from the table of forms: the families whose calls are understood."""

from __future__ import annotations

from api.chat.reading.table import rows


def table() -> str:
    """The forms in docs/tools.md."""
    return "".join(f"- `{name}`: {row.models}\n" for name, row in sorted(rows().items()))
