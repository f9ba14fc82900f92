"""`furrow models rebalance`: replicas move to where memory is."""

from __future__ import annotations

import time

import click
import msgspec

from control.operations import rebalance as operation
from control.operations.options import connect_to_farm, redis_option
from control.placement.rebalance import MOST_MOVES, Move
from control.redis.clients import SyncRedis
from control.sizes import in_words
from ops.cli.tables import echo_json, echo_line, json_option

TICK_S = 0.1


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
    moves = operation.planned_moves(operation.read_farm(client)) if dry_run else _make(client, as_json)
    if as_json:
        echo_json(Rebalanced(dry_run=dry_run, moves=moves))
        return
    for move in moves if dry_run else ():
        echo_line(_in_words(move))
    if not moves:
        echo_line("Nothing is to be moved.")


def _make(client: SyncRedis, quiet: bool) -> list[Move]:
    """Make one move after the other. Raises ModelUnavailable where a successor fails."""
    made: list[Move] = []
    while len(made) < MOST_MOVES:
        state = operation.read_farm(client)
        if not state.is_settled:
            time.sleep(TICK_S)
            continue
        move = operation.next_move(state)
        if move is None:
            break
        if not operation.begin(client, move, state):
            continue  # what the move follows from was changed meanwhile
        if not quiet:
            echo_line(_in_words(move))
        while not operation.is_over(client, move):
            time.sleep(TICK_S)
        made.append(move)
    return made


def _in_words(move: Move) -> str:
    size = in_words(sum(move.successor.memory))
    return f"{move.model}:{move.replica} moves from {move.source} to {move.target} with {size}: {move.why}."
