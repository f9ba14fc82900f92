"""Rendering a model's own chat template, as the Hugging Face libraries do it.

The environment follows transformers' chat template utilities: an immutable sandbox, trimmed blocks, loop controls, a
`tojson` that does not escape HTML, `raise_exception`, `strftime_now`, and the `generation` block as a no-op.
"""

from __future__ import annotations

import datetime
import json
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from control.errors import TemplateFailed


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks assistant text for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=64)
def variables_of(source: str) -> frozenset[str]:
    """The variables that a template reads; none for one that is no template, whose rendering says so."""
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(source)))
    except jinja2.TemplateError:
        return frozenset()


def special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` … as text; the config holds them as text or as an object with `content`."""
    found: dict[str, str] = {}
    for name, value in tokenizer_config.items():
        if not name.endswith("_token"):
            continue
        text: Any = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def render(
    source: str | None,
    messages: list[dict[str, Any]],
    tokenizer_config: dict[str, Any],
    variables: dict[str, Any],
) -> str:
    """Render the messages; `variables` are the request's chat_template_kwargs. Raises TemplateFailed."""
    if source is None:
        raise TemplateFailed(
            "This model has no chat template. Use /v1/completions, or add a chat_template.jinja to the model's folder.",
            param="messages",
            code="no_chat_template",
        )
    context: dict[str, Any] = {
        **special_tokens(tokenizer_config),
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        **variables,
        "messages": messages,
    }
    try:
        return _compile(source).render(context)
    except Exception as error:
        # A template is a program from the model's authors: whatever it raises is a failure of the template.
        raise TemplateFailed(
            f"The model's chat template refused these messages: {error}", param="messages", code="template_failed"
        ) from error
