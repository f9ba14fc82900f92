"""The decode rates as an SVG of horizontal bars, one group per number of streams, the limit as a line on each bar."""

from __future__ import annotations

from html import escape

from ops.bench.peers.report.report import Comparison, counted

WIDTH, LABEL, BAR, GAP, TITLE = 760, 210, 16, 5, 30
VALUE = 110
"""Room for the number behind a bar."""
OURS, THEIRS, LIMIT = "#2563eb", "#94a3b8", "#dc2626"


def chart(comparison: Comparison) -> str:
    """An SVG document. Bars of a group share a scale that ends at its largest rate: a limit beyond is not drawn."""
    parts: list[str] = []
    y = 8
    for streams in comparison.plan.streams:
        found = [(result, one) for result in comparison.measured if (one := result.median(streams)) is not None]
        if not found:
            continue
        y += TITLE
        parts.append(_text(0, y - 10, f"{counted(streams)}: tokens per second", bold=True))
        scale = (WIDTH - LABEL - VALUE) / max(one.decode for _, one in found)
        for result, one in found:
            colour = OURS if result.row.engine.startswith("furrow") else THEIRS
            length = one.decode * scale
            parts.append(_text(LABEL - 8, y + BAR - 4, str(result.row), anchor="end"))
            parts.append(f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>')
            parts.append(_text(LABEL + length + 6, y + BAR - 4, f"{one.decode:.1f}"))
            limit = LABEL + comparison.limit(result, streams) * scale
            if limit <= WIDTH - VALUE:
                parts.append(f'<path d="M{limit:.1f} {y - 1}v{BAR + 2}" stroke="{LIMIT}" stroke-width="2"/>')
            y += BAR + GAP
    legend = f"{comparison.model}, prompt {comparison.plan.prompt}, {comparison.plan.tokens} tokens; red: the limit"
    parts.append(_text(0, y + 16, legend))
    size = f'viewBox="0 0 {WIDTH} {y + 28}" font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y + 28}" fill="white"/>', *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
