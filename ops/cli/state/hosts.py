"""`furrow hosts`: the hosts of the farm."""

from __future__ import annotations

import click
import msgspec

from control.operations.options import connect_to_farm, redis_option
from control.placement import farm
from ops.cli.tables import echo_json, echo_table, json_option


class HostRow(msgspec.Struct, frozen=True, kw_only=True):
    """`replicas` are those that the host was given, as `model:replica`."""

    id: str
    state: str
    version: str | None
    devices: list[str]
    engines: list[str]
    replicas: list[str]


@click.command()
@json_option
@redis_option
def hosts(as_json: bool, redis_url: str | None) -> None:
    """List the hosts with their state, version, devices and replicas.

    A host is away when its agent has no heartbeat; its ranks may serve all the same.
    """
    client = connect_to_farm(redis_url)
    found = [
        HostRow(
            id=one.id,
            state="drained" if one.drained else "alive" if one.alive else "away",
            version=one.version,
            devices=one.devices,
            engines=one.engines,
            replicas=one.replicas,
        )
        for one in farm.host_cards(client)
    ]
    if as_json:
        echo_json(found)
        return
    if not found:
        click.echo("No hosts. Start one with `furrow worker`.")
        return
    rows = [
        (
            one.id,
            one.state,
            one.version or "-",
            ",".join(one.devices) or "cpu",
            ",".join(one.engines) or "-",
            " ".join(one.replicas) or "-",
        )
        for one in found
    ]
    echo_table([("HOST", "STATE", "VERSION", "DEVICES", "ENGINES", "REPLICAS"), *rows])
