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
    devices: list[str]
    replicas: list[str]


@click.command()
@json_option
@redis_option
def hosts(as_json: bool, redis_url: str | None) -> None:
    """List the hosts with their state, devices and replicas.

    A host is away when its agent has no heartbeat; its ranks may serve all the same.
    """
    client = connect_to_farm(redis_url)
    living = {host.id: host for host in farm.living_hosts(client)}
    drained = farm.drained_hosts(client)
    found = [
        HostRow(
            id=name,
            state="drained" if name in drained else "alive" if name in living else "away",
            devices=list(living[name].devices) if name in living else [],
            replicas=sorted(f"{one.spec.name}:{one.replica}" for one in farm.assignments(client, name)),
        )
        for name in farm.known_hosts(client)
    ]
    if as_json:
        echo_json(found)
        return
    if not found:
        click.echo("No hosts. Start one with `furrow worker`.")
        return
    rows = [(one.id, one.state, ",".join(one.devices) or "cpu", " ".join(one.replicas) or "-") for one in found]
    echo_table([("HOST", "STATE", "DEVICES", "REPLICAS"), *rows])
