"""Command-line options of `furrow` and `python -m api`, and the connection that they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from control.errors import SettingsError
from control.operations.local_farms import local_farm
from control.process import hide_argument
from control.redis.address import password_in
from control.settings import NAMING, redis_url_from_environment, redis_wait_s

if TYPE_CHECKING:
    from control.redis.clients import SyncRedis


NO_FARM = "no `furrow serve` runs here, and no Redis is named"
START_OR_NAME = f"start one, give {NAMING}, or set REDIS_URL"


def redis_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--redis`, else FURROW_REDIS_URL, else REDIS_URL, else a farm of this machine; `connect_to_farm` takes the
    value."""
    text = (
        "Redis to use: its URL, a file that holds it, or the data folder of `furrow serve` [default: $REDIS_URL, else "
        "the farm that runs here; `furrow serve` starts one of its own]."
    )
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


def farm_named(redis_url: str | None) -> str | None:
    """The Redis of an option, of the environment, or of the farm that `furrow serve` or `furrow run` has here; None
    without one. Raises SettingsError where several run here."""
    named = redis_url or redis_url_from_environment()
    if named is None and (folder := local_farm()) is not None:
        return str(folder)
    return named


def connect_to_farm(redis_url: str | None) -> SyncRedis:
    """Connect to the farm's Redis; waits for it and prints so. Raises SettingsError if none is named and none runs
    here."""
    from control.redis.connection import connect
    from control.redis.readiness import wait_until_ready

    named = farm_named(redis_url)
    if named is None:
        raise SettingsError(f"{NO_FARM}: {START_OR_NAME}")
    client = connect(named)
    wait_until_ready(client, redis_wait_s(), lambda line: click.echo(line, err=True))
    return client
