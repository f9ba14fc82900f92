"""`furrow drain`: empty a host, or replace one replica, without failing a request."""

from __future__ import annotations

import time

import click

from control.errors import SettingsError
from control.messages import Assignment
from control.operations.options import connect_to_farm, redis_option
from control.placement import farm
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.replicas import health
from ops.cli.tables import echo_line

TICK_S = 0.2


@click.command()
@click.argument("what", metavar="HOST|MODEL:REPLICA")
@click.option("--undo", is_flag=True, help="Allow replicas on HOST again; none moves back by itself.")
@click.option("--forget", is_flag=True, help="Remove HOST, which is away for good and has no replica, from all lists.")
@click.option("--no-wait", is_flag=True, help="Return at once.")
@redis_option
def drain(what: str, undo: bool, forget: bool, no_wait: bool, redis_url: str | None) -> None:
    """Empty HOST, or replace one replica.

    HOST gets no new replica, and each of its replicas stops once its successor on another host serves. If no other host
    has the devices, it stops all the same and its requests wait. MODEL:REPLICA stops one replica; another one takes its
    place. A replica that stops finishes its requests within the model's --drain-s.

    The command prints the progress and returns at the end. Ctrl-C ends the command and not the draining.
    """
    client = connect_to_farm(redis_url)
    if forget:
        if undo:
            raise SettingsError("--forget and --undo exclude each other; a host that comes back takes replicas again")
        farm.forget(client, what)
        echo_line(f"{what}: forgotten. A worker that starts there is known again.")
        return
    hosts = farm.known_hosts(client)
    if what in hosts:
        drain_host(client, what, undo, no_wait)
        return
    model, _, replica = what.rpartition(":")
    if undo or not model or catalog.get_spec(client, model) is None:
        there = ", ".join(hosts) or "there is none"
        raise SettingsError(f"host '{what}' is unknown; known: {there}. For one replica say MODEL:REPLICA")
    drain_replica(client, model, replica, no_wait)


def drain_host(client: SyncRedis, host_id: str, undo: bool, no_wait: bool) -> None:
    """Drain the host, and print its replicas until the last one has left."""
    changed = farm.drain(client, host_id, drained=not undo)
    if undo:
        echo_line(f"{host_id}: takes replicas again." if changed else f"{host_id}: was not drained.")
        return
    echo_line(f"{host_id}: drains.")
    told = ""
    while not no_wait:
        left = farm.assignments(client, host_id)
        line = ", ".join(_describe(client, one) for one in left)
        if line and line != told:
            echo_line(f"{host_id}: {line}")
            told = line
        if not left:
            echo_line(f"{host_id}: empty. It can be switched off; `furrow drain {host_id} --undo` takes it back.")
            return
        time.sleep(TICK_S)


def drain_replica(client: SyncRedis, model: str, replica: str, no_wait: bool) -> None:
    """Withdraw every part of the replica. Raises SettingsError if no host has it."""
    parts = farm.drain_replica(client, model, replica)
    echo_line(f"{model}:{replica}: drains.")
    while not no_wait and replica in run(client, catalog.replicas(model)):
        again = [one for host, _ in parts for one in farm.assignments(client, host) if one.replica == replica]
        if not any(one.withdrawn and one.spec.name == model for one in again):
            break  # its name has gone to its successor
        time.sleep(TICK_S)
    if not no_wait:
        echo_line(f"{model}:{replica}: gone.")


def _describe(client: SyncRedis, held: Assignment) -> str:
    model, replica = held.spec.name, held.replica
    if not held.withdrawn:
        return f"{model}:{replica} " + (
            "waits for its successor" if held.spec.surge else "stops before its successor starts (--in-place)"
        )
    state = next((one.state for one in health.overview(client, model).replicas if one.replica == replica), "gone")
    return f"{model}:{replica} {state}"
