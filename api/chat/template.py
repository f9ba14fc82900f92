"""Rendering a model's own chat template, as the Hugging Face libraries do it.

The environment follows transformers' chat template utilities: an immutable sandbox, trimmed blocks, loop controls, a
`tojson` that does not escape HTML, `raise_exception`, `strftime_now`, and the `generation` block as a no-op.

A template is a program from a model's authors. It is rendered in this process where an operator trusts it, or at the
prices of `api.chat.metered`; any other one in a process of its own (`api.models.confined`).
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.meta import find_undeclared_variables

from api.chat.metered import Exhausted, Metered, MeteredEnvironment, NeedsProcess, metered, size_of
from control.errors import TemplateFailed

SHIPPED = frozenset(("b7701d9f8d30b11f51be8738066a2eb4d22c0006c47f106982962634dc56ba04",))
"""SHA-256 of the templates that come with Furrow: that of the demonstration model."""


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
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


@lru_cache(maxsize=1)
def _metered_environment() -> MeteredEnvironment:
    return MeteredEnvironment(_environment())


class Template(Protocol):
    """A chat template."""

    @property
    def variables(self) -> frozenset[str]:
        """Those that it reads; none for a source that is no template, whose rendering says so. Raises NeedsProcess."""
        ...

    def render(self, context: dict[str, Any]) -> str:
        """Raises TemplateFailed, NeedsProcess."""
        ...


class PlainTemplate:
    """A template without bounds of work and memory."""

    def __init__(self, source: str) -> None:
        self._source = source

    @property
    def variables(self) -> frozenset[str]:
        return self._variables

    @cached_property
    def _variables(self) -> frozenset[str]:
        try:
            return frozenset(find_undeclared_variables(_environment().parse(self._source)))
        except Exception:  # what is no template, or one too deep
            return frozenset()

    @cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self._source)

    def render(self, context: dict[str, Any]) -> str:
        with failing():
            return self._template.render(context)


class MeteredTemplate:
    """A template with bounds of work and memory."""

    def __init__(self, source: str) -> None:
        self._metered: Metered | None = None
        # Why it needs a process, and why it is no template.
        self._unfit = ""
        self._wrong = ""
        try:
            self._metered = metered(source, _metered_environment())
        except NeedsProcess as error:
            self._unfit = str(error)
        except jinja2.TemplateError as error:
            self._wrong = str(error)
        self._most = sys.maxsize
        """Inputs of a larger size were too much work."""

    @property
    def variables(self) -> frozenset[str]:
        if self._unfit:
            raise NeedsProcess(self._unfit)
        return self._metered.variables if self._metered is not None else frozenset()

    def render(self, context: dict[str, Any]) -> str:
        if self._metered is None:
            raise NeedsProcess(self._unfit) if self._unfit else refused(self._wrong)
        size = size_of(context)
        if size > self._most:
            raise NeedsProcess("less was too much")
        try:
            with failing():
                return self._metered.render(context)
        except Exhausted:
            self._most = size // 2
            raise


@contextmanager
def failing() -> Generator[None]:
    """TemplateFailed for whatever a template raises: it is the template's failure. NeedsProcess passes."""
    try:
        yield
    except (NeedsProcess, MemoryError):
        raise
    except Exception as error:
        raise refused(str(error) or type(error).__name__) from error


def refused(reason: str) -> TemplateFailed:
    return TemplateFailed(
        f"The model's chat template refused these messages: {reason}", param="messages", code="template_failed"
    )


def special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` … as text; the config holds them as text or as an object with `content`."""
    texts: dict[str, str] = {}
    for name, value in tokenizer_config.items():
        if not name.endswith("_token"):
            continue
        text: Any = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    return texts


def render(
    template: Template | None,
    messages: list[dict[str, Any]],
    tokenizer_config: dict[str, Any],
    variables: dict[str, Any],
) -> str:
    """Render the messages; `variables` are the request's chat_template_kwargs. Raises TemplateFailed, NeedsProcess."""
    if template is None:
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
    return template.render(context)
