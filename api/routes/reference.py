"""The OpenAPI document as one page of plain HTML: no scripts, no fonts, nothing from any other host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import Any, cast

import msgspec

JsonObject = dict[str, Any]

_METHODS = ("get", "post", "put", "patch", "delete")
_REFERENCE = re.compile(r"&quot;#/components/(schemas|responses)/([^&]+)&quot;")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .3rem 0; } code, pre { font: 13px/1.4 ui-monospace, monospace; }
pre { background: #8881; padding: .7rem; overflow-x: auto; } table { border-collapse: collapse; }
td, th { text-align: left; vertical-align: top; padding: .2rem .9rem .2rem 0; }
b.method { display: inline-block; min-width: 4.5rem; } :target { outline: 2px solid #88f; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd; } a { color: #8ab4f8; } }
"""


def page(document: JsonObject) -> bytes:
    """The page with all operations and types; references are links within it."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    body = [f"<h1>{title}</h1>", '<p>The same for programs: <a href="/schema/openapi.json">openapi.json</a></p>']
    body += [_operation(path, method, each) for path, method, each in _operations(document)]
    body += ["<h2>Types</h2>"]
    for kind in ("responses", "schemas"):
        for name, each in document.get("components", {}).get(kind, {}).items():
            body.append(_folded(f"{kind}-{name}", f"<code>{escape(name)}</code>", _json(each)))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    text = f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n'
    return (text + "\n".join(body) + "\n</body></html>\n").encode()


def _operations(document: JsonObject) -> Iterator[tuple[str, str, JsonObject]]:
    for path, methods in document["paths"].items():
        for method in _METHODS:
            if method in methods:
                yield path, method, methods[method]


def _operation(path: str, method: str, operation: JsonObject) -> str:
    title = (
        f'<b class="method">{method.upper()}</b> <code>{escape(path)}</code> {escape(operation.get("summary") or "")}'
    )
    parts = [f"<p>{escape(operation.get('description') or '')}</p>"]
    if parameters := operation.get("parameters"):
        parts.append("<table><tr><th>parameter</th><th>in</th><th></th></tr>")
        parts += [_parameter(parameter) for parameter in parameters]
        parts.append("</table>")
    if body := operation.get("requestBody"):
        parts += ["<h4>Body</h4>", *_contents(body)]
    for status, response in operation["responses"].items():
        parts.append(f"<h4>{escape(status)} {escape(response.get('description') or '')}</h4>")
        parts += _contents(response) if "content" in response else [_json(response)]
    return _folded(f"{method}-{path}", title, "\n".join(parts))


def _parameter(parameter: JsonObject) -> str:
    about = parameter.get("description") or parameter.get("schema", {}).get("type") or ""
    needed = ", required" if parameter.get("required") else ""
    return (
        f"<tr><td><code>{escape(parameter['name'])}</code></td><td>{escape(parameter['in'])}{needed}</td>"
        f"<td>{escape(str(about))}</td></tr>"
    )


def _contents(holder: JsonObject) -> list[str]:
    content = cast(JsonObject, holder.get("content", {}))
    return [f"<p><code>{escape(kind)}</code></p>{_json(media)}" for kind, media in content.items()]


def _folded(anchor: str, title: str, body: str) -> str:
    return f'<details id="{escape(anchor)}"><summary>{title}</summary>\n{body}\n</details>'


def _json(value: Any) -> str:
    """Readable JSON, whose references are links."""
    text = escape(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
    return f"<pre>{_REFERENCE.sub(_link, text)}</pre>"


def _link(match: re.Match[str]) -> str:
    return f'<a href="#{match[1]}-{match[2]}">{match[2]}</a>'
