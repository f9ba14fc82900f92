"""The rule by which an API process requires a key: always, where other machines can reach it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from control.errors import SettingsError
from control.listening import is_loopback

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
