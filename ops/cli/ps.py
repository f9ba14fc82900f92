"""`furrow ps`, the replicas that run now, and `furrow history`, their epochs and faults."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import click
import msgspec

from control.clock import now_ms
from control.operations.model_reports import EpochEvent
from control.operations.model_reports import history as events_of
from control.operations.options import connect_to_farm, redis_option
from control.redis.clients import SyncRedis
from control.redis.connection import run_every
from control.replicas import health, model_overviews
from control.sizes import in_words
from ops.cli.tables import duration, echo_list, json_option


class RunningReplica(msgspec.Struct, frozen=True, kw_only=True):
    """`memory_bytes` is the sum over its rank processes of what each has in the host's memory, shared pages in each;
    `serving_since_ms` the time at which its present group had loaded, None before."""

    model: str
    replica: str
    state: str
    host: str
    devices: list[str]
    memory_bytes: int
    running: int
    queued: int
    """Requests that wait for the model."""
    serving_since_ms: int | None


def running_replicas(client: SyncRedis) -> list[RunningReplica]:
    """Every replica with a rank that beats, in order of name. Raises RedisUnavailable."""
    replicas = [
        (overview, replica)
        for overview in model_overviews.overviews(client)
        for replica in overview.replicas
        if any(replica.beats)
    ]
    formed = run_every(client, [health.formations(overview.model, replica.replica) for overview, replica in replicas])
    rows: list[RunningReplica] = []
    for (overview, replica), epochs in zip(replicas, formed, strict=True):
        beats = [beat for beat in replica.beats if beat is not None]
        rows.append(
            RunningReplica(
                model=overview.model,
                replica=replica.replica,
                state="paused" if overview.paused and replica.state == "loaded" else replica.state,
                host=replica.host,
                devices=replica.devices,
                memory_bytes=sum(beat.memory_bytes for beat in beats),
                running=sum(beat.running for beat in beats),
                queued=overview.queued,
                serving_since_ms=next(
                    (formation.loaded for formation in epochs if formation.epoch == replica.epoch), None
                ),
            )
        )
    return rows


COLUMNS: dict[str, Callable[[RunningReplica], object]] = {
    "MODEL": lambda replica: replica.model,
    "REPLICA": lambda replica: replica.replica,
    "STATE": lambda replica: replica.state,
    "HOST": lambda replica: replica.host or "-",
    "DEVICES": lambda replica: ",".join(replica.devices) or "-",
    "MEMORY": lambda replica: in_words(replica.memory_bytes),
    "RUNNING": lambda replica: replica.running,
    "QUEUED": lambda replica: replica.queued,
    "SERVING FOR": lambda replica: (
        "-" if replica.serving_since_ms is None else duration(max(0, now_ms() - replica.serving_since_ms))
    ),
}


@click.command()
@json_option
@redis_option
def ps(as_json: bool, redis_url: str | None) -> None:
    """List the replicas that run: host, devices, memory, requests, and for how long they serve.

    A replica that can't run is in `furrow models list`, with the reason.
    """
    nothing = "Nothing runs. `furrow models load MODEL` loads a model; `furrow models list` shows what is wanted."
    echo_list(running_replicas(connect_to_farm(redis_url)), COLUMNS, nothing, as_json)


# --- history ----------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("model")
@json_option
@redis_option
def history(model: str, as_json: bool, redis_url: str | None) -> None:
    """List the latest epochs of MODEL and the faults that ended them, newest first.

    Up to 64 of each are kept for a replica.
    """
    events = events_of(connect_to_farm(redis_url), model)
    echo_list(events, EVENT_COLUMNS, f"No epochs of '{model}' are known.", as_json)


def _detail(event: EpochEvent) -> str:
    if event.event == "fault":
        rank = "" if event.rank is None else f"rank {event.rank}: "
        return f"{rank}{event.kind}: {event.message}"
    stages = (("gathered", event.gathered_ms), ("joined", event.joined_ms), ("loaded", event.loaded_ms))
    return ", ".join(f"{name} in {duration(ms or 0)}" for name, ms in stages)


EVENT_COLUMNS: dict[str, Callable[[EpochEvent], object]] = {
    "TIME": lambda event: _when(event.at_ms),
    "REPLICA": lambda event: event.replica,
    "EPOCH": lambda event: event.epoch,
    "EVENT": lambda event: event.event,
    "DETAIL": _detail,
}


def _when(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
