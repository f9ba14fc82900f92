"""Command-line options of `furrow` and `python -m api`, and the connection that they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from control.errors import SettingsError
from control.process import hide_argument
from control.redis.address import password_in
from control.settings import NAMING, redis_url_from_environment, redis_wait_s

if TYPE_CHECKING:
    from control.redis.clients import SyncRedis


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


def connect_to_farm(redis_url: str | None) -> SyncRedis:
    """Connect to the farm's Redis; waits for it and prints so. Raises SettingsError if none is named."""
    from control.redis.connection import connect
    from control.redis.readiness import wait_until_ready

    named = redis_url or redis_url_from_environment()
    if named is None:
        raise SettingsError(f"no Redis is named: give {NAMING}, or set REDIS_URL")
    client = connect(named)
    wait_until_ready(client, redis_wait_s(), lambda line: click.echo(line, err=True))
    return client
