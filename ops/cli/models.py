"""`furrow models`: the desired models of the farm, and their state."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import msgspec

from control.errors import ModelUnavailable, RedisUnavailable, SettingsError
from control.operations import desired as desired_state
from control.operations.options import connect_to_farm, redis_option
from control.operations.spec import Scale, build_spec
from control.placement import membership
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.servers import server_memory
from control.replicas import model_overviews
from control.sizes import parse_seconds
from ops.cli.hosts import rebalance
from ops.cli.options import idle_option, model_options
from ops.cli.plan import plan
from ops.cli.progress import Stage, Waiting, stage_of
from ops.cli.tables import echo_json, echo_line, echo_list, json_option
from ops.demo import MODEL_DIR

TICK_S = 0.1
_DRAIN = "Seconds that a replaced replica has to finish its requests."
_SURGE = "Run one more replica during a change, or stop each replica before its successor starts."
NO_WORKER_S = 2.5
"""A host's heartbeat lives two seconds: an agent that is only being replaced is no missing one."""


def wait_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--wait` and `--timeout`."""
    limit = click.FloatRange(0, min_open=True)
    text = "Give up the wait after so many seconds, with status 1; the model stays desired [default: none]."
    function = click.option("--timeout", type=limit, metavar="SECONDS", help=text)(function)
    text = "Return when the desired replicas serve, and no others."
    return click.option("--wait", is_flag=True, help=text)(function)


def replicas_option(default: str, required: bool = False) -> Callable[..., Any]:
    """`--replicas`, a number or a range."""
    text = f"Copies that share the queue: 2, or 0..4 for as many as the requests need {default}".rstrip() + "."
    return click.option("--replicas", metavar="N|N..M", callback=_scale, required=required, help=text)


def _scale(context: click.Context, parameter: click.Parameter, value: str | None) -> Scale | None:
    """Raises SettingsError for what is no number of replicas."""
    return None if value is None else Scale.of(value)


def _seconds(context: click.Context, parameter: click.Parameter, value: str) -> float:
    return parse_seconds(value)


def _check_timeout(wait: bool, timeout: float | None) -> None:
    if timeout is not None and not wait:
        raise SettingsError("--timeout is for --wait: add it")


@click.group()
def models() -> None:
    """Load, pause, unload and list the models of the farm."""


models.add_command(plan)
models.add_command(rebalance)


@models.command()
@click.argument("model")
@model_options
@replicas_option("[default: as many as now, or 1]")
@click.option(
    "--target-wait",
    "target_wait_s",
    metavar="TIME",
    default="2s",
    show_default=True,
    callback=_seconds,
    help="With a range of --replicas: run one more where requests expect to wait longer.",
)
@idle_option
@click.option("--spread", is_flag=True, help="Spread the ranks of a replica over the hosts, not on one.")
@click.option("--drain-s", type=click.IntRange(0), default=300, show_default=True, help=_DRAIN)
@click.option("--surge/--in-place", default=True, help=_SURGE)
@click.option("--if-needed", is_flag=True, help="Succeed if MODEL is already loaded with these settings.")
@wait_option
@redis_option
def load(
    model: str,
    redis_url: str | None,
    if_needed: bool,
    wait: bool,
    timeout: float | None,
    replicas: Scale | None,
    **options: Any,
) -> None:
    """Load MODEL: `demo`, a folder, or a Hugging Face repository.

    If it is loaded with other settings or from another source, its replicas are replaced one by one, without failing a
    request. The command returns at once, unless --wait is given; the agents of the farm do the work.
    """
    _check_timeout(wait, timeout)
    spec = build_spec(model, demo=MODEL_DIR, **options)
    client = connect_to_farm(redis_url)
    desired = desired_state.load(client, spec, replicas)
    if not desired.changed:
        if if_needed:
            echo_line(f"{spec.name}: already desired with these settings.")
            return
        raise SettingsError(
            f"model '{spec.name}' is already loaded with these settings; nothing was changed. "
            f"If its files are new, use `furrow models reload {spec.name}`"
        )
    if desired.before not in (0, desired.revision):
        echo_line(
            f"{spec.name}: revision {desired.revision} replaces its replicas. `furrow models list` shows how far it is."
        )
    else:
        echo_line(f"{spec.name}: loading. `furrow models list` shows when it is loaded.")
    if wait:
        wait_until_rolled_out(client, spec.name, timeout)


@models.command()
@click.argument("name")
@wait_option
@redis_option
def reload(name: str, wait: bool, timeout: float | None, redis_url: str | None) -> None:
    """Restart the replicas of the model NAME.

    They restart one by one and load changed files. No request fails.
    """
    _check_timeout(wait, timeout)
    client = connect_to_farm(redis_url)
    revision = desired_state.reload(client, name)
    echo_line(f"{name}: its replicas are being replaced by revision {revision}.")
    if wait:
        wait_until_rolled_out(client, name, timeout)


@models.command()
@click.argument("name")
@replicas_option("", required=True)
@wait_option
@redis_option
def scale(name: str, replicas: Scale, wait: bool, timeout: float | None, redis_url: str | None) -> None:
    """Run more or fewer replicas of the model NAME. A replica that stops finishes its requests."""
    _check_timeout(wait, timeout)
    client = connect_to_farm(redis_url)
    desired_state.scale(client, name, replicas)
    echo_line(f"{name}: {replicas} {'replica is' if str(replicas) == '1' else 'replicas are'} desired.")
    if wait:
        wait_until_rolled_out(client, name, timeout)


def wait_until_rolled_out(client: SyncRedis, name: str, timeout: float | None) -> None:
    """Print the progress until all is as desired. Raises ModelUnavailable if the new revision can't be served, or is
    not within `timeout` seconds; RedisUnavailable if Redis doesn't answer then. Without a worker, that is said after
    NO_WORKER_S."""
    last = ""
    began = worker_seen = time.monotonic()
    warning_shown = False
    with Waiting() as waiting:
        while True:
            now = time.monotonic()
            try:
                overview = model_overviews.overview(client, name)
                hosts = membership.living_hosts(client)
            except RedisUnavailable as error:
                if timeout is not None and now - began > timeout:
                    raise
                waiting.show(Stage(str(error)))
                worker_seen = now  # nothing is known of workers meanwhile
                time.sleep(TICK_S)
                continue
            line = f"{name}: revision {overview.revision}, {overview.rolled_out} of {overview.wanted} replicas"
            leaving = len(overview.replicas) - overview.wanted
            line += f", {leaving} to go" if leaving > 0 else ""
            if line != last:
                waiting.print(line)
                last = line
            if overview.is_rolled_out:
                return
            for replica in overview.replicas:
                if replica.state == "failed" and replica.revision == overview.revision:
                    raise ModelUnavailable(name, "failed", f"replica {replica.replica}: {replica.detail}")
            if hosts:
                worker_seen = now
                warning_shown = False
            elif now - worker_seen > NO_WORKER_S and not warning_shown:
                waiting.print(f"{name}: {NO_WORKER}")
                warning_shown = True
            if timeout is not None and now - began > timeout:
                why = NO_WORKER if warning_shown else stage_of(overview).text
                raise ModelUnavailable(
                    name, overview.state, f"not as desired after {timeout:g} s; it stays desired. {why}"
                )
            waiting.show(stage_of(overview))
            time.sleep(TICK_S)


NO_WORKER = "no worker is alive. Run `furrow worker` on a host; `furrow hosts` lists those that were there"


@models.command()
@click.argument("name")
@redis_option
def pause(name: str, redis_url: str | None) -> None:
    """Claim no more requests of the model NAME.

    New requests wait in its queue until `furrow models resume`, or until their deadline. Running ones are finished.
    """
    changed = desired_state.pause(connect_to_farm(redis_url), name, paused=True)
    again = f"`furrow models resume {name}` claims them again"
    echo_line(f"{name}: {'paused' if changed else 'was paused already'}. Its requests wait; {again}.")


@models.command()
@click.argument("name")
@redis_option
def resume(name: str, redis_url: str | None) -> None:
    """Claim the requests of the paused model NAME again."""
    changed = desired_state.pause(connect_to_farm(redis_url), name, paused=False)
    echo_line(f"{name}: {'resumed' if changed else 'was not paused'}.")


@models.command()
@click.argument("name")
@redis_option
def unload(name: str, redis_url: str | None) -> None:
    """Unload the model NAME. Running requests are finished first."""
    client = connect_to_farm(redis_url)
    desired_state.unload(client, name)
    echo_line(f"{name}: unloading.")


def _detail(overview: model_overviews.Overview, replica: model_overviews.ReplicaOverview) -> str:
    """The detail of a replica, and that its model is paused."""
    return "; ".join(part for part in ("paused" if overview.paused else "", replica.detail) if part)


def _without_assets(overview: model_overviews.Overview) -> dict[str, Any]:
    """An overview as JSON. The mark of its assets is for API processes."""
    fields: dict[str, Any] = msgspec.to_builtins(overview)
    del fields["assets"]
    return fields


def _columns(weights: dict[str, str]) -> dict[str, Callable[[ListedReplica], object]]:
    """Of the listing; `weights`: the type of each model's weights."""
    return {
        "MODEL": lambda row: row.model.model,
        "REPLICA": lambda row: row.replica.replica if row.replica else "-",
        "STATE": lambda row: (row.replica or row.model).state,
        "KIND": lambda row: row.model.kind or "-",
        "REVISION": lambda row: (row.replica or row.model).revision,
        "WEIGHTS": lambda row: weights.get(row.model.model, "-"),
        "HOST": lambda row: (row.replica and row.replica.host) or "-",
        "DEVICES": lambda row: (row.replica and ",".join(row.replica.devices)) or "-",
        "EPOCH": lambda row: (row.replica and row.replica.epoch) or "-",
        "STEP": lambda row: row.replica.seq if row.replica else "-",
        "QUEUED": lambda row: row.model.queued,
        "DETAIL": lambda row: _detail(row.model, row.replica) if row.replica else row.model.detail,
    }


class ListedReplica(NamedTuple):
    """A row; a model that sleeps has no replica."""

    model: model_overviews.Overview
    replica: model_overviews.ReplicaOverview | None


@models.command(name="list")
@json_option
@redis_option
def list_models(as_json: bool, redis_url: str | None) -> None:
    """List the replicas of every model.

    A row has state, kind (generate, embed or score), revision, weights, host, devices, epoch, last step and errors. A
    last line shows the progress of a change. The memory of Redis is printed on standard error.
    """
    client = connect_to_farm(redis_url)
    overviews = model_overviews.overviews(client)
    if as_json:
        echo_json([_without_assets(overview) for overview in overviews])
        return
    for server in server_memory(client):
        click.echo(str(server), err=True)
    weights = {spec.name: spec.quant or spec.dtype for spec in catalog.list_specs(client)}
    rows = [ListedReplica(overview, replica) for overview in overviews for replica in overview.replicas or [None]]
    echo_list(rows, _columns(weights), "No models. Load one with `furrow models load MODEL`.", as_json=False)
    for overview in overviews:
        if len({replica.revision for replica in overview.replicas}) > 1:
            progress = f"{overview.rolled_out} of {overview.wanted} replicas"
            echo_line(f"{overview.model}: revision {overview.revision} is rolled out on {progress}.")
