"""`furrow history`: the epochs and faults of a model's replicas."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from control.operations.history import EpochEvent
from control.operations.history import history as events_of
from control.operations.options import connect_to_farm, redis_option
from ops.cli.tables import duration, echo_json, echo_line, echo_table, json_option


@click.command()
@click.argument("model")
@json_option
@redis_option
def history(model: str, as_json: bool, redis_url: str | None) -> None:
    """List the latest epochs of MODEL and the faults that ended them, newest first.

    Up to 64 of each are kept for a replica.
    """
    client = connect_to_farm(redis_url)
    found = events_of(client, model)
    if as_json:
        echo_json(found)
        return
    if not found:
        echo_line(f"No epochs of '{model}' are known.")
        return
    rows = [(_when(one.at_ms), one.replica, str(one.epoch), one.event, _detail(one)) for one in found]
    echo_table([("TIME", "REPLICA", "EPOCH", "EVENT", "DETAIL"), *rows])


def _detail(one: EpochEvent) -> str:
    if one.event == "fault":
        rank = "" if one.rank is None else f"rank {one.rank}: "
        return f"{rank}{one.kind}: {one.message}"
    stages = (("gathered", one.gathered_ms), ("joined", one.joined_ms), ("loaded", one.loaded_ms))
    return ", ".join(f"{name} in {duration(ms or 0)}" for name, ms in stages)


def _when(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
