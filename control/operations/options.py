"""Command-line options of `furrow` and `python -m api`: the farm to connect to, and the API keys that an API process
requires. It always requires one where other machines can reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from control.errors import SettingsError
from control.operations.local_farms import local_farm
from control.process import hide_argument
from control.redis.urls import password_in
from control.settings import NAMING, redis_url_from_environment, redis_wait_s

if TYPE_CHECKING:
    from control.redis.clients import SyncRedis
from control.listening import is_loopback

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
    from control.redis.servers import wait_until_ready

    named = farm_named(redis_url)
    if named is None:
        raise SettingsError(f"{NO_FARM}: {START_OR_NAME}")
    client = connect(named)
    wait_until_ready(client, redis_wait_s(), lambda line: click.echo(line, err=True))
    return client


FIXED_KEYS_VARIABLE = "FURROW_API_KEYS"
"""Fixed secrets in the environment, which a list of processes doesn't show."""


def key_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--api-key`, `--keys` and `--no-auth`, which `asks_for_key` reads."""
    text = f"An API key that clients may use. Repeatable [default: the words of ${FIXED_KEYS_VARIABLE}]."
    fixed = click.option("--api-key", "api_keys", multiple=True, envvar=FIXED_KEYS_VARIABLE, help=text)
    keys_help = "Require an API key; the default if other machines can reach --host."
    keys = click.option("--keys", is_flag=True, help=keys_help)
    no_auth = click.option("--no-auth", is_flag=True, help="Require no API key.")
    return fixed(keys(no_auth(function)))


def asks_for_key(host: str, api_keys: tuple[str, ...], keys: bool, no_auth: bool) -> bool:
    """By the options that were given; raises SettingsError for those that contradict each other.

    `api_keys`: fixed secrets; `keys`: asked for explicitly; `no_auth`: open explicitly.
    """
    if no_auth and (api_keys or keys):
        option = "--api-key" if api_keys else "--keys"
        raise SettingsError(f"--no-auth and {option} contradict each other: leave one of them out")
    return bool(api_keys) or keys or not (no_auth or is_loopback(host))


def why_asked(host: str, key_count: int, where: str = "") -> str:
    """The reason for an operator; `key_count` counts the keys, `where` is an option for `furrow keys`."""
    reason = "" if is_loopback(host) else f"{host} can be reached from elsewhere, so "
    remedy = f"`furrow keys list{where}` shows them" if key_count else f"Make one with `furrow keys create{where}`"
    way_out = "" if is_loopback(host) else ", or require none with --no-auth"
    verb = "is" if key_count == 1 else "are"
    return f"{reason}every request needs an API key; there {verb} {key_count}. {remedy}{way_out}."
