"""The command-line options of an API process, which `furrow serve` takes as well and passes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from api.chat.reading.response_template import form_of
from api.chat.reading.table import TABLE
from api.images.hosts import AllowedHosts
from api.schemas.view import OWN
from control.keys import TENANT_NAME

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s*]+")


def check_origins(_context: click.Context, _parameter: click.Parameter, origins: tuple[str, ...]) -> tuple[str, ...]:
    """Origins as browsers send them: scheme and host, a port where it is not the scheme's own, and no path.

    Applications and extensions have schemes of their own; pages from a file have the origin `null`.
    """
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise click.BadParameter(
                f"{origin!r} is no origin; write https://HOST, http://HOST:PORT, app://NAME, null or *."
            )
    return origins


def read_hosts(_context: click.Context, _parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """Each host alone; several may be given with commas between them."""
    hosts = tuple(host for names in words for host in names.split(","))
    try:
        AllowedHosts(hosts)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None
    return hosts


def read_tenants(_context: click.Context, _parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """Each tenant alone; several may be given with commas between them."""
    tenants = tuple(tenant for names in words for tenant in names.split(","))
    for tenant in tenants:
        if not TENANT_NAME.fullmatch(tenant):
            raise click.BadParameter(f"{tenant!r} is no tenant's name; write all, or TENANT[,TENANT].")
    return tenants


def read_chat_template(_context: click.Context, _parameter: click.Parameter, path: str | None) -> str | None:
    """The absolute path of a file of text."""
    return None if path is None else _readable(path)[0]


def read_response_template(_context: click.Context, _parameter: click.Parameter, path: str | None) -> str | None:
    """The absolute path of a file with a response template."""
    if path is None:
        return None
    absolute, text = _readable(path)
    try:
        form_of(OWN, json.loads(text))
    except ValueError as error:
        raise click.BadParameter(f"{path!r} is no response template: {error}.") from None
    return absolute


def _readable(path: str) -> tuple[str, str]:
    try:
        return str(Path(path).resolve()), Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path!r} can't be read: {error}.") from None


class ApiOption(click.Option):
    """An option of an API process."""


def _option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    return click.option(*names, cls=ApiOption, show_default=attributes.get("default") is not None, **attributes)


_OPTIONS = (
    _option(
        "--served-model-name",
        "served_model_names",
        multiple=True,
        help="NAME for the only model, NAME=MODEL for one of several, or * for any name of the only one. Repeatable.",
    ),
    _option(
        "--ollama-port",
        type=click.IntRange(1, 65535),
        help="A second port to listen on, for clients that look for Ollama at 11434 [default: none].",
    ),
    _option(
        "--cors-origin",
        "cors_origins",
        multiple=True,
        callback=check_origins,
        help="Origin whose pages may call the API from a browser (https://HOST, app://NAME, or * for all). Repeatable.",
    ),
    _option(
        "--grace", type=click.FloatRange(0), default=30.0, help="Seconds for which open streams continue after SIGTERM."
    ),
    _option(
        "--reader-timeout",
        default=60.0,
        type=click.FloatRange(min=0, min_open=True),
        help="Seconds after which a client that reads nothing is disconnected.",
    ),
    _option(
        "--header-timeout",
        default=10.0,
        envvar="FURROW_HEADER_TIMEOUT",
        type=click.FloatRange(min=0, min_open=True),
        help="Seconds in which a request's headers must arrive, and the grace of a slow body; a late request gets 408.",
    ),
    _option(
        "--max-connections",
        default=8192,
        envvar="FURROW_MAX_CONNECTIONS",
        type=click.IntRange(1),
        help="Open connections. Beyond the limit idle connections are closed, and new ones get 503 if none is idle.",
    ),
    _option(
        "--max-body",
        default=6.0,
        envvar="FURROW_MAX_BODY",
        type=click.FloatRange(min=0.1),
        help="MiB of one request's body, if the model's context does not set a smaller limit; a larger body gets 413.",
    ),
    _option(
        "--body-memory",
        default=64.0,
        envvar="FURROW_BODY_MEMORY",
        type=click.FloatRange(min=1),
        help="MiB of all request bodies that are being read; one tenant may use a quarter of it.",
    ),
    _option(
        "--keep-alive",
        type=click.FloatRange(min=0, min_open=True),
        default=10.0,
        help="Seconds without an event after which a stream sends a comment.",
    ),
    _option(
        "--max-queued",
        "max_queued_requests",
        default=4096,
        type=click.IntRange(1),
        help="Requests in a model's queue; a request beyond the limit gets 429.",
    ),
    _option(
        "--max-queue-wait",
        default=60.0,
        type=click.FloatRange(0),
        help="Longest expected wait in seconds; a request that would wait longer gets 429. 0: no limit.",
    ),
    _option(
        "--max-load-wait",
        default=0.0,
        type=click.FloatRange(0),
        help="Longest wait in seconds for a model on demand to be loaded; then 503. 0: as long as it takes.",
    ),
    _option(
        "--response-ttl",
        default=86_400.0,
        type=click.FloatRange(0),
        help="Seconds for which /v1/responses stores an answer; 0: answers are not stored.",
    ),
    _option(
        "--response-bytes",
        type=click.IntRange(1),
        help="Bytes of stored responses of one tenant, or of all callers without a key; the oldest are deleted "
        "[default: a sixteenth of Redis' memory].",
    ),
    _option(
        "--response-number",
        default=100_000,
        type=click.IntRange(1),
        help="Stored responses of one tenant, or of all callers without a key; the oldest responses are deleted.",
    ),
    _option(
        "--keep-requests",
        type=click.FloatRange(0, 2_592_000),
        default=0.0,
        help="Seconds for which Redis keeps prompt and tokens of a request that has ended, for `furrow replay`.",
    ),
    _option(
        "--console-text",
        is_flag=True,
        help="Show prompts and answers of all tenants to operators, in the console and on /farm/…/text.",
    ),
    _option(
        "--image-hosts",
        "image_hosts",
        multiple=True,
        metavar="HOST[,HOST]",
        callback=read_hosts,
        help="Hosts that images are fetched from by http and https: exact names with public addresses, HOST or "
        "HOST:PORT. Repeatable [default: none, images come as data URLs].",
    ),
    _option(
        "--share-prefixes",
        "share_prefixes",
        multiple=True,
        metavar="all|TENANT[,TENANT]",
        callback=read_tenants,
        help="Let requests of these tenants, or of all, begin with each other's cached prefixes. Usage and time to the "
        "first token then show to one what another has sent. Repeatable [default: prefixes are shared within a tenant; "
        "callers without a key are one].",
    ),
    _option(
        "--strict",
        is_flag=True,
        help="Refuse token limits beyond the context instead of cutting them, and fields that have no effect.",
    ),
    _option(
        "--trust-template",
        "trusted_templates",
        multiple=True,
        metavar="MODEL|SHA256",
        help="Render this model's chat template, or the template with this SHA-256, without bounds of work and memory. "
        "Repeatable [default: only templates that come with Furrow].",
    ),
    _option(
        "--tool-parser",
        type=click.Choice(sorted(TABLE)),
        help="Format in which the models write tool calls [default: the format of their chat templates].",
    ),
    _option(
        "--response-template",
        metavar="FILE",
        callback=read_response_template,
        help="JSON file that says how the models write calls and reasoning: transformers' `response_template` "
        "[default: that of a model's tokenizer_config.json, else the format of its chat template].",
    ),
    _option(
        "--chat-template",
        metavar="FILE",
        callback=read_chat_template,
        help="Jinja file that is rendered in place of the models' own chat templates.",
    ),
)


def api_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Every option of an API process but its address, its Redis and its keys."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_api_arguments(context: click.Context, values: dict[str, Any]) -> list[str]:
    """The options among `values` that are an API process's, as words of its command line; they leave `values`.

    Those that are set by default are left out; an API process inherits the environment that sets the others.
    """
    words: list[str] = []
    for option in context.command.params:
        if isinstance(option, ApiOption):
            value = values.pop(option.name)
            source = context.get_parameter_source(option.name)
            if source in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP):
                for element in value if option.multiple else [value]:
                    words.append(option.opts[0])
                    if not option.is_flag:
                        words.append(str(element))
    return words
