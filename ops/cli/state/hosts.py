"""`furrow hosts`: the hosts of the farm."""

from __future__ import annotations

import click
import msgspec

from control.operations.options import connect_to_farm, redis_option
from control.placement import farm
from control.sizes import in_words
from ops.cli.tables import echo_json, echo_table, json_option


class HostRow(msgspec.Struct, frozen=True, kw_only=True):
    """`replicas` are those that the host was given, as `model:replica`."""

    id: str
    state: str
    version: str | None
    devices: list[str]
    engines: list[str]
    memory: list[farm.DeviceMemory]
    replicas: list[str]


def _memory(device: farm.DeviceMemory) -> str:
    """The part of a device's memory that is planned, or what is free where it is not planned."""
    name = "" if device.device == "cpu" else f"{device.device} "
    if device.given is not None:
        return f"{name}{in_words(device.assigned)} of {in_words(device.given)} planned"
    return f"{name}{in_words(device.free)} free" if device.free is not None else f"{name}not known"


@click.command()
@json_option
@redis_option
def hosts(as_json: bool, redis_url: str | None) -> None:
    """List the hosts with their state, version, devices, engines, memory and replicas.

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
            memory=one.memory,
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
            "; ".join(map(_memory, one.memory)) or "-",
            " ".join(one.replicas) or "-",
        )
        for one in found
    ]
    echo_table([("HOST", "STATE", "VERSION", "DEVICES", "ENGINES", "MEMORY", "REPLICAS"), *rows])
