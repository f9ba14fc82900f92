"""`furrow keys`: API keys, their limits and their usage."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from api.schemas.farm import key_card
from control import access
from control.access import ApiKey, Usage
from control.errors import SettingsError
from control.keys import CLASSES
from control.operations.options import connect_to_farm, redis_option
from ops.cli.tables import echo_json, echo_line, echo_list, json_option

_UNITS = {"m": 60, "h": 3_600, "d": 86_400}


def limit_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Limits and rights of a key; an option that is not given is None."""
    for option in reversed(
        [
            click.option("--rpm", type=click.IntRange(0), help="Requests per minute; 0: any number."),
            click.option(
                "--tpm", type=click.IntRange(0), help="Tokens per minute, prompts and answers; 0: any number."
            ),
            click.option("--max-concurrent", type=click.IntRange(0), help="Requests at one time; 0: any number."),
            click.option("--priority-cap", type=click.Choice(CLASSES), help="Highest class of its requests."),
            click.option("--model", "models", multiple=True, help="A model for the key; repeatable [default: all]."),
            click.option("--expires", metavar="30d|12h|DATE", help="Lifetime from now, or a date (UTC)."),
        ]
    ):
        function = option(function)
    return function


@click.group()
def keys() -> None:
    """Create, limit, list and revoke API keys, and show their usage."""


@keys.command()
@click.option("--name", default="", help="A name for people [default: the id of the key].")
@click.option("--tenant", default="", help="Keys of a tenant share turns and see each other's requests.")
@click.option("--admin", is_flag=True, help="Let the key use the operator's routes, /farm.")
@limit_options
@redis_option
def create(redis_url: str | None, name: str, tenant: str, admin: bool, **limits: Any) -> None:
    """Create an API key and print its secret.

    The secret is printed only once: the farm keeps a hash of it.
    """
    key, secret = access.mint(name=name, tenant=tenant, admin=admin, **fields_of(limits))
    access.create(connect_to_farm(redis_url), key)
    echo_line(f"API key {key.id} ({key.name}). Its secret is not shown again:", err=True)
    click.echo(secret)


@keys.command(name="list")
@click.option("--all", "everything", is_flag=True, help="Show revoked and expired keys too.")
@json_option
@redis_option
def list_all(redis_url: str | None, as_json: bool, everything: bool) -> None:
    """List the API keys: state, limits, last use."""
    now = time.time()
    cards = access.list_keys(connect_to_farm(redis_url))
    shown = [(key, used) for key, used in cards if everything or key.state(now) == "active"]
    columns: dict[str, Callable[[tuple[ApiKey, int]], object]] = {
        "ID": lambda card: card[0].id,
        "NAME": lambda card: card[0].name,
        "TENANT": lambda card: card[0].tenant,
        "STATE": lambda card: card[0].state(now),
        "ADMIN": lambda card: "yes" if card[0].admin else "-",
        "RPM": lambda card: card[0].rpm or "-",
        "TPM": lambda card: card[0].tpm or "-",
        "AT ONCE": lambda card: card[0].max_concurrent or "-",
        "CAP": lambda card: card[0].priority_cap,
        "MODELS": lambda card: ",".join(card[0].models) or "all",
        "CREATED": lambda card: day(card[0].created),
        "USED": lambda card: day(card[1]),
    }
    nothing = "No API keys. Make one with `furrow keys create`."
    echo_list(shown, columns, nothing, as_json, lambda card: key_card(card[0], now, card[1]))


@keys.command()
@click.argument("key")
@json_option
@redis_option
def show(redis_url: str | None, as_json: bool, key: str) -> None:
    """Show the record of KEY (an id or a name)."""
    record = access.find(connect_to_farm(redis_url), key)
    if as_json:
        echo_json(key_card(record, time.time()))
        return
    for name, value in described(record).items():
        echo_line(f"{name:<15} {', '.join(value) if isinstance(value, list) else value}".rstrip())


@keys.command()
@click.argument("key")
@redis_option
def revoke(redis_url: str | None, key: str) -> None:
    """Revoke KEY (an id or a name) within about a second. Its running requests continue."""
    client = connect_to_farm(redis_url)
    revoked = access.revoke(client, access.find(client, key))
    echo_line(f"{revoked.id} ({revoked.name}): revoked.")


@keys.command()
@click.argument("key")
@click.option("--all-models", is_flag=True, help="Let the key use every model again.")
@limit_options
@redis_option
def limits(redis_url: str | None, key: str, all_models: bool, **limits: Any) -> None:
    """Change the limits of KEY (an id or a name) that are given. Running requests are not affected."""
    client = connect_to_farm(redis_url)
    record = access.find(client, key)
    changes = fields_of(limits) | ({"models": []} if all_models else {})
    if not changes:
        raise SettingsError(f"say what to change of {record.id}; `furrow keys limits --help` lists what there is")
    access.change(client, record, **changes)
    echo_line(f"{record.id} ({record.name}): changed.")


@keys.command()
@click.argument("key", required=False)
@click.option("--days", type=click.IntRange(1, 400), default=30, show_default=True, help="Number of days, with today.")
@json_option
@redis_option
def usage(redis_url: str | None, as_json: bool, key: str | None, days: int) -> None:
    """Show the usage of KEY, or of all keys.

    KEY is an id or a name. A row is the usage of a day (UTC) and model.
    """
    client = connect_to_farm(redis_url)
    days_of_use = access.usage(client, days, access.find(client, key).id if key is not None else None)
    names = {record.id: record.name for record, _ in access.list_keys(client)}
    columns: dict[str, Callable[[Usage], object]] = {
        "DAY": lambda use: use.date,
        "KEY": lambda use: use.key,
        "NAME": lambda use: names.get(use.key, "-"),
        "MODEL": lambda use: use.model,
        "REQUESTS": lambda use: use.requests,
        "PROMPT": lambda use: use.prompt_tokens,
        "CACHED": lambda use: use.cached_tokens,
        "COMPLETION": lambda use: use.completion_tokens,
    }
    echo_list(days_of_use, columns, "Nothing was used.", as_json)


def fields_of(limits: dict[str, Any]) -> dict[str, Any]:
    """The options that were used, as fields of an ApiKey."""
    fields = {name: value for name, value in limits.items() if value not in (None, ())}
    if "models" in fields:
        fields["models"] = sorted(set(fields["models"]))
    if "expires" in fields:
        fields["expires"] = moment(fields["expires"], time.time())
    return fields


def moment(text: str, now: float) -> int:
    """`30d`, `12h` or `15m` from now, or a date, as Unix seconds. Raises SettingsError."""
    if match := re.fullmatch(r"(\d{1,6})([mhd])", text):
        return int(now) + int(match[1]) * _UNITS[match[2]]
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise SettingsError(f"--expires {text!r} is no time: say 30d, 12h or 15m from now, or 2031-12-31") from None
    return int((at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp())


def described(key: ApiKey) -> dict[str, Any]:
    """The record of a key for display: without its hash, times as dates."""
    fields: dict[str, Any] = msgspec.to_builtins(key)
    del fields["sha256"]
    times = {name: day(fields[name]) for name in ("created", "expires", "revoked")}
    return fields | times | {"state": key.state(time.time())}


def day(seconds: int) -> str:
    """A time as a date; `-` for never."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="minutes")[:16] + "Z" if seconds else "-"
