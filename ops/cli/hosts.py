"""The hosts of the farm and what they have: `furrow hosts`, `furrow drain`, `furrow models rebalance`."""

from __future__ import annotations

import time
from collections.abc import Callable

import click
import msgspec

from control.errors import SettingsError
from control.messages import Assignment
from control.operations import rebalance as operation
from control.operations.options import connect_to_farm, redis_option
from control.placement import farm, membership
from control.placement.rebalance import MOST_MOVES, Move
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.replicas import model_overviews
from control.sizes import in_words
from ops.cli.tables import echo_json, echo_line, echo_list, json_option


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


COLUMNS: dict[str, Callable[[HostRow], str]] = {
    "HOST": lambda host: host.id,
    "STATE": lambda host: host.state,
    "VERSION": lambda host: host.version or "-",
    "DEVICES": lambda host: ",".join(host.devices) or "cpu",
    "ENGINES": lambda host: ",".join(host.engines) or "-",
    "MEMORY": lambda host: "; ".join(map(_memory, host.memory)) or "-",
    "REPLICAS": lambda host: " ".join(host.replicas) or "-",
}


@click.command()
@json_option
@redis_option
def hosts(as_json: bool, redis_url: str | None) -> None:
    """List the hosts with their state, version, devices, engines, memory and replicas.

    A host is away when its agent has no heartbeat; its ranks may serve all the same.
    """
    client = connect_to_farm(redis_url)
    cards = [
        HostRow(
            id=card.id,
            state="drained" if card.drained else "alive" if card.alive else "away",
            version=card.version,
            devices=card.devices,
            engines=card.engines,
            memory=card.memory,
            replicas=card.replicas,
        )
        for card in farm.host_cards(client)
    ]
    echo_list(cards, COLUMNS, "No hosts. Start one with `furrow worker`.", as_json)


# --- drain ------------------------------------------------------------------------------------------------------------


TICK_S = 0.2


@click.command()
@click.argument("target", metavar="HOST|MODEL:REPLICA")
@click.option("--undo", is_flag=True, help="Allow replicas on HOST again; none moves back by itself.")
@click.option("--forget", is_flag=True, help="Remove HOST, which is away for good and has no replica, from all lists.")
@click.option("--no-wait", is_flag=True, help="Return at once.")
@redis_option
def drain(target: str, undo: bool, forget: bool, no_wait: bool, redis_url: str | None) -> None:
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
        farm.forget(client, target)
        echo_line(f"{target}: forgotten. A worker that starts there is known again.")
        return
    hosts = membership.known_hosts(client)
    if target in hosts:
        drain_host(client, target, undo, no_wait)
        return
    model, _, replica = target.rpartition(":")
    if undo or not model or catalog.get_spec(client, model) is None:
        there = ", ".join(hosts) or "there is none"
        raise SettingsError(f"host '{target}' is unknown; known: {there}. For one replica say MODEL:REPLICA")
    drain_replica(client, model, replica, no_wait)


def drain_host(client: SyncRedis, host_id: str, undo: bool, no_wait: bool) -> None:
    """Drain the host, and print its replicas until the last one has left."""
    changed = membership.drain(client, host_id, drained=not undo)
    if undo:
        echo_line(f"{host_id}: takes replicas again." if changed else f"{host_id}: was not drained.")
        return
    echo_line(f"{host_id}: drains.")
    last_line = ""
    while not no_wait:
        assignments = farm.assignments(client, host_id)
        line = ", ".join(_describe(client, assignment) for assignment in assignments)
        if line and line != last_line:
            echo_line(f"{host_id}: {line}")
            last_line = line
        if not assignments:
            echo_line(f"{host_id}: empty. It can be switched off; `furrow drain {host_id} --undo` takes it back.")
            return
        time.sleep(TICK_S)


def drain_replica(client: SyncRedis, model: str, replica: str, no_wait: bool) -> None:
    """Withdraw every part of the replica. Raises SettingsError if no host has it."""
    parts = farm.drain_replica(client, model, replica)
    echo_line(f"{model}:{replica}: drains.")
    while not no_wait and replica in run(client, catalog.replicas(model)):
        again = [part for host, _ in parts for part in farm.assignments(client, host) if part.replica == replica]
        if not any(part.withdrawn and part.spec.name == model for part in again):
            break  # its name has gone to its successor
        time.sleep(TICK_S)
    if not no_wait:
        echo_line(f"{model}:{replica}: gone.")


def _describe(client: SyncRedis, assignment: Assignment) -> str:
    model = assignment.spec.name
    replica = assignment.replica
    if not assignment.withdrawn:
        return f"{model}:{replica} " + (
            "waits for its successor" if assignment.spec.surge else "stops before its successor starts (--in-place)"
        )
    state = next(
        (row.state for row in model_overviews.overview(client, model).replicas if row.replica == replica), "gone"
    )
    return f"{model}:{replica} {state}"


# --- rebalance --------------------------------------------------------------------------------------------------------


MOVE_TICK_S = 0.1


class Rebalanced(msgspec.Struct, frozen=True, kw_only=True):
    """`moves` were made, or with `dry_run` would be."""

    dry_run: bool
    moves: list[Move]


@click.command()
@click.option("--dry-run", is_flag=True, help="Print the moves, and make none.")
@json_option
@redis_option
def rebalance(dry_run: bool, as_json: bool, redis_url: str | None) -> None:
    """Move replicas to other hosts, so that a model without a place finds room, or memory is used more evenly.

    One replica moves at a time: it finishes its requests while its successor loads, and the next one follows when the
    successor serves. Replicas on one host's CPUs are moved, on hosts that plan their memory. Ctrl-C ends the command
    and not the move that has begun.
    """
    client = connect_to_farm(redis_url)
    moves = operation.read_farm(client).moves() if dry_run else _make(client, as_json)
    if as_json:
        echo_json(Rebalanced(dry_run=dry_run, moves=moves))
        return
    for move in moves if dry_run else ():
        echo_line(_in_words(move))
    if not moves:
        echo_line("Nothing is to be moved.")


def _make(client: SyncRedis, quiet: bool) -> list[Move]:
    """Make one move after the other. Raises ModelUnavailable where a successor fails."""
    moves: list[Move] = []
    while len(moves) < MOST_MOVES:
        state = operation.read_farm(client)
        if not state.is_settled:
            time.sleep(MOVE_TICK_S)
            continue
        move = state.next_move()
        if move is None:
            break
        if not operation.begin(client, move, state):
            continue  # what the move follows from was changed meanwhile
        if not quiet:
            echo_line(_in_words(move))
        while not operation.is_over(client, move):
            time.sleep(MOVE_TICK_S)
        moves.append(move)
    return moves


def _in_words(move: Move) -> str:
    size = in_words(sum(move.successor.memory))
    return f"{move.model}:{move.replica} moves from {move.source} to {move.target} with {size}: {move.why}."
