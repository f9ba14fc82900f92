"""Command-line options of `furrow` and `python -m api`, and the connection that they name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from control.errors import SettingsError
from control.process import hide_argument
from control.redis.address import password_in
from control.redis.clients import SyncRedis
from control.redis.connection import connect
from control.redis.readiness import wait_until_ready
from control.settings import NAMING, redis_url_from_environment, redis_wait_s
from control.settings import redis_url as named_url


def redis_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--redis`, else FURROW_REDIS_URL, else REDIS_URL; `connect_to_farm` takes the value."""
    text = "Redis to use: its URL, a file that holds it, or the data folder of `furrow serve` [default: $REDIS_URL]."
    return click.option("--redis", "redis_url", metavar="URL|PATH", callback=_without_password, help=text)(function)


def _without_password(context: click.Context, parameter: click.Parameter, named: str | None) -> str | None:
    """Overwrite a password on the command line, which other users of the machine can read, and print a warning."""
    secret = password_in(named) if named else None
    if secret and context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE:
        hide_argument(secret)
        click.echo(
            "warning: the password of --redis was on the command line, where other users of this machine can read it. "
            "Set REDIS_URL, or give --redis a file that holds the URL.",
            err=True,
        )
    return named


def quota_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--response-bytes` and `--response-number`: the quota of stored responses."""
    size = click.option(
        "--response-bytes",
        type=click.IntRange(1),
        help="Bytes of stored responses of one tenant, or of all callers without a key; the oldest are deleted "
        "[default: a sixteenth of Redis' memory].",
    )
    number = click.option(
        "--response-number",
        default=100_000,
        show_default=True,
        type=click.IntRange(1),
        help="Stored responses of one tenant, or of all callers without a key; the oldest are deleted.",
    )
    return size(number(function))


def connect_to_farm(redis_url: str | None) -> SyncRedis:
    """Connect to the farm's Redis; waits for it and prints so. Raises SettingsError if none is named."""
    url = named_url(redis_url) if redis_url else redis_url_from_environment()
    if url is None:
        raise SettingsError(f"no Redis is named: give {NAMING}, or set REDIS_URL")
    client = connect(url)
    wait_until_ready(client, redis_wait_s(), lambda line: click.echo(line, err=True))
    return client


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


cors_option = click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    callback=check_origins,
    help="Let pages of this origin call from a browser (https://HOST, app://NAME, or * for all). Repeatable.",
)
