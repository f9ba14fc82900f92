"""`furrow history`: the epochs and faults of a model's replicas."""

from __future__ import annotations

from datetime import UTC, datetime

import click
import msgspec

from control.operations.options import connect_to_farm, redis_option
from control.records import catalog
from control.redis.connection import run, run_every
from control.replicas import health
from ops.cli.tables import duration, echo_json, echo_table, json_option


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch that was formed, or a fault that ended one. An epoch's number is the time of its begin in ms."""

    at_ms: int
    replica: str
    epoch: int
    event: str
    detail: str


@click.command()
@click.argument("model")
@json_option
@redis_option
def history(model: str, as_json: bool, redis_url: str | None) -> None:
    """List the latest epochs of MODEL and the faults that ended them, newest first.

    Up to 64 of each are kept for a replica. A fault has the time of the epoch that it ended.
    """
    client = connect_to_farm(redis_url)
    catalog.model_names(client, model)
    names = sorted(run(client, catalog.replicas(model)))
    formed = run_every(client, [health.formations(model, name) for name in names])
    poisons = run_every(client, [health.poison_history(model, name) for name in names])
    found = [
        *(_formed(name, one) for name, epochs in zip(names, formed, strict=True) for one in epochs),
        *(_fault(name, one) for name, faults in zip(names, poisons, strict=True) for one in faults),
    ]
    found.sort(key=lambda one: (one.epoch, one.event == "fault"), reverse=True)
    if as_json:
        echo_json(found)
        return
    if not found:
        click.echo(f"No epochs of '{model}' are known.")
        return
    rows = [(_when(one.at_ms), one.replica, str(one.epoch), one.event, one.detail) for one in found]
    echo_table([("TIME", "REPLICA", "EPOCH", "EVENT", "DETAIL"), *rows])


def _formed(replica: str, one: health.Formation) -> Event:
    stages = (
        ("gathered", one.gathered - one.led),
        ("joined", one.joined - one.gathered),
        ("loaded", one.loaded - one.joined),
    )
    detail = ", ".join(f"{name} in {duration(max(0, ms))}" for name, ms in stages)
    return Event(at_ms=one.led, replica=replica, epoch=one.epoch, event="formed", detail=detail)


def _fault(replica: str, one: health.Poison) -> Event:
    rank = "" if one.rank < 0 else f"rank {one.rank}: "
    return Event(
        at_ms=one.epoch, replica=replica, epoch=one.epoch, event="fault", detail=f"{rank}{one.kind}: {one.message}"
    )


def _when(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
