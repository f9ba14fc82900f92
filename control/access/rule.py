"""Whether an API process asks its clients for a key: always where others than this machine can reach it."""

from __future__ import annotations

from control.errors import SettingsError
from control.listening import is_loopback


def asks_for_key(host: str, api_keys: tuple[str, ...], keys: bool, no_auth: bool) -> bool:
    """By the options that were given; raises SettingsError for those that contradict each other.

    `api_keys`: fixed secrets; `keys`: asked for explicitly; `no_auth`: open explicitly.
    """
    if no_auth and (api_keys or keys):
        given = "--api-key" if api_keys else "--keys"
        raise SettingsError(f"--no-auth and {given} contradict each other: leave one of them out")
    return bool(api_keys) or keys or not (no_auth or is_loopback(host))


def why_asked(host: str, known: int, where: str = "") -> str:
    """What an operator should know; `known`: how many keys there are, `where`: what `furrow keys` is to be given."""
    reason = "" if is_loopback(host) else f"{host} can be reached from elsewhere, so "
    remedy = f"`furrow keys list{where}` shows them" if known else f"Make one with `furrow keys create{where}`"
    way_out = "" if is_loopback(host) else ", or let everybody in with --no-auth"
    return f"{reason}every request needs an API key; there {'are' if known != 1 else 'is'} {known}. {remedy}{way_out}."
