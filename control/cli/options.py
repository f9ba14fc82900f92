"""Options that several verbs share, and the checks of what they may hold."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from control.address import password_in
from control.clients import SyncRedis
from control.connection import connect
from control.errors import DevicesError, SettingsError
from control.keys import check_model_name
from control.messages import ModelSpec
from control.process import hide_argument
from control.quantization import check_quant
from control.readiness import wait_until_ready
from control.requests.bounds import refusal
from control.settings import NAMING, redis_url_from_environment, redis_wait_s
from control.settings import redis_url as named_url

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_DEVICE = re.compile(r"cpu|cuda:\d+")


def redis_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--redis`, else FURROW_REDIS_URL, else REDIS_URL; `connect_to_farm` reads what it names."""
    text = "Redis to use: its URL, a file that holds it, or the data folder of `furrow serve` [default: $REDIS_URL]."
    return click.option("--redis", "redis_url", metavar="URL|PATH", callback=_without_password, help=text)(function)


def _without_password(context: click.Context, parameter: click.Parameter, named: str | None) -> str | None:
    """Other users of the machine can read command lines: a password there is overwritten, and the user is warned."""
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
        help="Bytes that the stored responses of one tenant, or of all callers without a key, may take; the oldest go "
        "[default: a sixteenth of Redis' memory].",
    )
    number = click.option(
        "--response-number",
        default=100_000,
        show_default=True,
        type=click.IntRange(1),
        help="Stored responses that one tenant, or all callers without a key, may have; the oldest go.",
    )
    return size(number(function))


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What describes how a model is run; `build_spec` takes them all."""
    for option in reversed(
        [
            click.option("--name", help="Name that clients use [default: the last part of MODEL]."),
            click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Ranks per replica."),
            click.option("--devices", help="One per rank: cpu, or cuda:0,cuda:1 [default: the GPUs, else the CPU]."),
            click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True),
            click.option("--max-context", type=click.IntRange(16), help="Serve a shorter context than the model's."),
            click.option(
                "--kv-tokens", type=click.IntRange(16), help="Tokens of KV memory [default: from free memory]."
            ),
            click.option(
                "--prefix-cache/--no-prefix-cache",
                default=True,
                show_default=True,
                help="Whether requests may begin with KV that others have computed.",
            ),
            click.option(
                "--quant",
                metavar="[int8|f16]",
                help="Pack the weights in 8 or 16 bits, on CPUs (chosen where --devices is silent).",
            ),
        ]
    ):
        function = option(function)
    return function


def build_spec(
    model: str,
    *,
    name: str | None,
    tp: int,
    devices: str | None,
    dtype: str,
    max_context: int | None,
    kv_tokens: int | None,
    quant: str | None,
    prefix_cache: bool = True,
    replicas: int = 1,
    spread: bool = False,
    drain_s: int = 300,
    surge: bool = True,
) -> ModelSpec:
    """The desired state that the options describe. Raises RequestError, DevicesError or SettingsError."""
    numbers = {"tp": tp, "max_context": max_context, "kv_tokens": kv_tokens, "replicas": replicas, "drain_s": drain_s}
    for number, value in numbers.items():
        if value is not None and (text := refusal(number, value)) is not None:
            raise SettingsError(text)
    source = model_source(model)
    placed = parse_devices(devices, tp)
    check_quant(quant, dtype, placed)
    if quant is not None and not placed:
        placed = ["cpu"] * tp
    return ModelSpec(
        name=check_model_name(name or model_name(model)),
        source=source,
        tp=tp,
        replicas=replicas,
        spread=spread,
        drain_s=drain_s,
        surge=surge,
        devices=placed,
        dtype=dtype,
        quant=quant,
        max_context=max_context,
        kv_tokens=kv_tokens,
        prefix_cache=prefix_cache,
    )


def model_source(model: str) -> str:
    """`demo` is the model that comes with Furrow; a folder becomes absolute; anything else is a repository id."""
    if model == "demo":
        package = importlib.util.find_spec("ops.demo")
        if package is None or package.origin is None:
            raise SettingsError(
                "the demonstration model is not part of this installation; name a folder or a repository"
            )
        return str(Path(package.origin).parent / "model")
    if Path(model).is_dir() or model.startswith((".", "/", "~")):
        return str(Path(model).expanduser().resolve())
    return model


def model_name(model: str) -> str:
    """A folder is served under its last part, a repository under its full id."""
    return Path(model).expanduser().resolve().name if model_source(model).startswith("/") and model != "demo" else model


def parse_devices(devices: str | None, tp: int) -> list[str]:
    """Raises DevicesError naming both numbers where there is not one device per rank. `cpu` alone serves all ranks."""
    if not devices:
        return []
    named = [device.strip() for device in devices.split(",")]
    for device in named:
        if not _DEVICE.fullmatch(device):
            raise DevicesError(f"device {device!r} is unknown: use cpu, or cuda:0, cuda:1 and so on")
    if named == ["cpu"]:
        named *= tp
    if len(named) != tp:
        raise DevicesError(f"{len(named)} devices were given for {tp} ranks (--tp {tp}): name one device per rank")
    return named


def connect_to_farm(redis_url: str | None) -> SyncRedis:
    """The farm's Redis, waited for with a visible message. Raises SettingsError where none is named."""
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
