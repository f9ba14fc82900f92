"""`furrow bench load`: the scenarios against a farm that runs, or against one started for each of them."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import ExitStack
from pathlib import Path

import click

from control.errors import FurrowError
from control.operations.options import redis_option
from control.operations.spec import build_spec
from control.redis.connection import connect_async
from control.settings import redis_url_from_environment
from ops.bench.common.client import Base, request
from ops.bench.common.farm import NOBODY_REFUSED, private_farm, say
from ops.bench.common.machine import describe
from ops.bench.load import report as reports
from ops.bench.load import traffic
from ops.bench.load.scenarios import SCENARIOS, Scenario, chosen
from ops.demo import MODEL_DIR


@click.command(epilog=f"Scenarios: {', '.join(SCENARIOS)}; all of them where none is named.")
@click.argument("scenarios", nargs=-1)
@click.option("--url", metavar="URL", help="API of the farm to load, such as http://127.0.0.1:8000.")
@redis_option
@click.option("--model", "models", multiple=True, help="Model to ask; repeatable [default: all that are served].")
@click.option(
    "--self", "own", is_flag=True, help="Start a private farm for each scenario, with its models and replicas."
)
@click.option("--source", default="demo", show_default=True, help="With --self: model to serve.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="With --self: ranks per replica.")
@click.option("--devices", default="cpu", show_default=True, help="With --self: one per rank.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for all figures.")
def load(
    scenarios: tuple[str, ...],
    url: str | None,
    redis_url: str | None,
    models: tuple[str, ...],
    own: bool,
    source: str,
    tp: int,
    devices: str,
    json_file: Path | None,
) -> None:
    """Run SCENARIOS and print the figures of each; the exit status is 1 if one fails.

    A scenario fails if a request fails, or if a segment has no data.
    """
    if own == (url is not None):
        raise click.UsageError("give either --url (and --redis) of a farm that runs, or --self")
    spec = build_spec(source, tp=tp, devices=devices, demo=MODEL_DIR)
    machine, results = describe(), []
    click.echo(machine)
    for scenario in chosen(scenarios):
        with ExitStack() as stack:
            if own:
                say(f"{scenario.name}: starting {' + '.join(map(str, scenario.replicas))} replicas of {spec.name}")
                farm = stack.enter_context(private_farm(spec, scenario.replicas, *NOBODY_REFUSED))
            else:
                farm = (url or "", _redis(redis_url), list(models))
            result = asyncio.run(_measure(scenario, *farm))
        results.append(result)
        click.echo(reports.table(result) + "\n")
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine, "scenarios": [r.as_json() for r in results]}, indent=1))
    failed = [result.scenario for result in results if result.faults]
    if failed:
        click.echo(f"failed: {', '.join(failed)}", err=True)
        sys.exit(1)


def _redis(redis_url: str | None) -> str:
    url = redis_url or redis_url_from_environment()
    if url is None:
        raise click.UsageError("the timestamps are in Redis: give --redis redis://host:port or set REDIS_URL")
    return url


async def _measure(scenario: Scenario, url: str, redis_url: str, models: list[str]) -> reports.Report:
    try:
        base = Base.of(url)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    models = models or await _served(base)
    if len(models) < scenario.models:
        raise click.UsageError(f"{scenario.name} asks {scenario.models} models; served: {', '.join(models) or 'none'}")
    client = connect_async(redis_url)
    try:
        return reports.report(await traffic.run(scenario, base, models, client))
    except* FurrowError as group:
        raise group.exceptions[0] from group
    finally:
        await client.aclose()


async def _served(base: Base) -> list[str]:
    """The models that the API lists."""
    try:
        async with request(base, "GET", "/v1/models") as response:
            return [model["id"] for model in json.loads(await response.read())["data"]]
    except OSError as error:
        raise click.UsageError(f"no API answers at {base.host}:{base.port}: {error.strerror or error}") from error
