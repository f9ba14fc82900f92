"""`furrow top`: models, replicas and ranks with their rates, once a second."""

from __future__ import annotations

import sys
import time
from typing import Any

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from control.errors import RedisUnavailable
from control.operations.options import connect_to_farm, redis_option
from control.records import catalog
from control.redis.clients import SyncRedis
from control.replicas import health, model_overviews
from control.sizes import in_words
from ops.cli.tables import LONGEST_CELL, duration, echo_json, one_line

EVERY_S = 1.0
LONG_MS = 2_000
"""The age of a command from which on it is shown."""
_STYLES = {"loaded": "green", "failed": "bold red", "poisoned": "red", "recovering": "yellow", "loading": "cyan"}


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """`pending_ms`: the age of its command. `slow`: the other ranks of its group wait for it, either in most of their
    forwards, or in a long command: since the last reading it made progress there, and another rank made none."""

    rank: int
    device: str
    pid: int
    phase: str
    step: int
    pending_ms: int
    memory_bytes: int
    slow: bool


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are those between two readings; None before the second one, and while no leader beats."""

    replica: str
    state: str
    detail: str
    host: str
    running: int
    tokens_per_second: float | None
    first_token_ms: float | None
    """The mean of the requests that got their first token between the readings; None where none did."""
    kv_usage: float | None
    ranks: list[RankRow]


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    state: str
    paused: bool
    queued: int
    expected_wait_ms: int | None
    wanted: int
    serving: int
    replicas: list[ReplicaRow]


class Rates:
    """Turns the counts of two readings into rates."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[float, list[health.Beat | None]]] = {}

    def rows(self, overviews: list[model_overviews.Overview], kv_tokens: dict[str, int]) -> list[ModelRow]:
        """The rows of a reading that was made just now; `kv_tokens`: the KV memory of a replica, by model."""
        now = time.monotonic()
        return [
            ModelRow(
                model=overview.model,
                state=overview.state,
                paused=overview.paused,
                queued=overview.queued,
                expected_wait_ms=overview.load.expected_wait_ms,
                wanted=overview.wanted,
                serving=sum(replica.state == "loaded" for replica in overview.replicas),
                replicas=[
                    self._replica(overview.model, replica, kv_tokens.get(overview.model, 0), now)
                    for replica in overview.replicas
                ],
            )
            for overview in overviews
        ]

    def _replica(self, model: str, replica: model_overviews.ReplicaOverview, kv_tokens: int, now: float) -> ReplicaRow:
        leader = replica.beats[0] if replica.beats else None
        since, before = self._last.get((model, replica.replica), (now, []))
        self._last[model, replica.replica] = now, replica.beats
        rate = first = None
        last = before[0] if before else None
        if leader is not None and last is not None and now > since and leader.tokens >= last.tokens:
            rate = (leader.tokens - last.tokens) / (now - since)
            firsts = leader.first_tokens - last.first_tokens
            first = (leader.first_tokens_ms - last.first_tokens_ms) / firsts if firsts > 0 else None
        slow = _slow(before, replica.beats).union(replica.slow)
        return ReplicaRow(
            replica=replica.replica,
            state=replica.state,
            detail=replica.detail,
            host=replica.host,
            running=leader.running if leader is not None else 0,
            tokens_per_second=rate,
            first_token_ms=first,
            kv_usage=leader.kv_used / kv_tokens if leader is not None and kv_tokens else None,
            ranks=[_rank(rank, beat, rank in slow) for rank, beat in enumerate(replica.beats) if beat is not None],
        )


def _slow(before: list[health.Beat | None], now: list[health.Beat | None]) -> set[int]:
    """The ranks that got on with a long command while another rank stood still, which waits for them."""
    moved = {
        rank: beat.progress != old.progress
        for rank, (old, beat) in enumerate(zip(before, now, strict=False))
        if old is not None and beat is not None and beat.oldest_pending_ms > LONG_MS
    }
    return {rank for rank, got_on in moved.items() if got_on} if not all(moved.values()) else set()


def _rank(rank: int, beat: health.Beat, slow: bool) -> RankRow:
    return RankRow(
        rank=rank,
        device=beat.device,
        pid=beat.pid,
        phase=beat.phase,
        step=beat.seq,
        pending_ms=beat.oldest_pending_ms,
        memory_bytes=beat.memory_bytes,
        slow=slow,
    )


@click.command()
@click.option("--once", is_flag=True, help="Print one reading, over a second, and return.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print JSON.")
@redis_option
def top(once: bool, as_json: bool, redis_url: str | None) -> None:
    """Show models, replicas and ranks with tokens a second, KV memory, queue and expected wait.

    It reads Redis once a second until Ctrl-C. Output to a pipe is that of --once.
    """
    client = connect_to_farm(redis_url)
    rates = Rates()
    if once or as_json or not sys.stdout.isatty():
        _read(client, rates)
        time.sleep(EVERY_S)
        rows = _read(client, rates)
        if as_json:
            echo_json(rows)
        else:
            Console(width=None if sys.stdout.isatty() else 160).print(_table(rows))
        return
    with Live(_table(_read(client, rates)), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(EVERY_S)
                live.update(_turn(client, rates), refresh=True)
        except KeyboardInterrupt:
            return


def _turn(client: SyncRedis, rates: Rates) -> Any:
    """The next picture: while Redis is away that is said."""
    try:
        return _table(_read(client, rates))
    except RedisUnavailable as error:
        return Text(one_line(f"Redis is away: {error}"), style="bold red")


def _read(client: SyncRedis, rates: Rates) -> list[ModelRow]:
    overviews = model_overviews.overviews(client)
    assets = {overview.model: catalog.get_assets(client, overview.model) for overview in overviews}
    return rates.rows(overviews, {name: card.kv_tokens for name, card in assets.items() if card is not None})


def _table(rows: list[ModelRow]) -> Any:
    if not rows:
        return Text("No models. Load one with `furrow models load MODEL`.")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "MODEL",
        "REPLICA",
        "STATE",
        "HOST",
        "RUN",
        "QUEUE",
        "WAIT",
        "TOK/S",
        "FIRST",
        "KV",
        "RANKS",
        "DETAIL",
    ):
        table.add_column(name, no_wrap=name not in ("RANKS", "DETAIL"), justify="right" if name in _NUMBERS else "left")
    for model in rows:
        for place, replica in enumerate(model.replicas):
            table.add_row(*_cells(model, replica, first=place == 0))
    if sum(len(model.replicas) for model in rows) > 1:
        table.add_row(*_totals(rows), style="bold")
    return Group(table)


_NUMBERS = ("RUN", "QUEUE", "WAIT", "TOK/S", "FIRST", "KV")


def _cells(model: ModelRow, replica: ReplicaRow, first: bool) -> list[Text]:
    wait = "-" if model.expected_wait_ms is None else duration(model.expected_wait_ms)
    state = "paused" if model.paused and replica.state == "loaded" else replica.state
    return [
        Text(one_line(model.model) if first else ""),
        Text(one_line(replica.replica)),
        Text(state, style="yellow" if state == "paused" else _STYLES.get(replica.state, "")),
        Text(one_line(replica.host) or "-"),
        Text(str(replica.running)),
        Text(str(model.queued) if first else ""),
        Text(wait if first else ""),
        Text("-" if replica.tokens_per_second is None else f"{replica.tokens_per_second:.1f}"),
        Text("-" if replica.first_token_ms is None else duration(replica.first_token_ms)),
        Text("-" if replica.kv_usage is None else f"{replica.kv_usage:.0%}"),
        Text("  ").join([_rank_text(rank) for rank in replica.ranks]) if replica.ranks else Text("-"),
        Text(one_line(replica.detail, LONGEST_CELL)),
    ]


def _totals(rows: list[ModelRow]) -> list[str]:
    """Of all models: requests that run and wait, tokens a second, memory of the ranks."""
    replicas = [replica for model in rows for replica in model.replicas]
    rates = [replica.tokens_per_second for replica in replicas if replica.tokens_per_second is not None]
    ranks = [rank for replica in replicas for rank in replica.ranks]
    queued = sum(model.queued for model in rows)
    rate = f"{sum(rates):.1f}" if rates else "-"
    running = sum(replica.running for replica in replicas)
    memory = f"{len(ranks)} ranks, {in_words(sum(rank.memory_bytes for rank in ranks))}"
    return ["all", str(len(replicas)), "", "", str(running), str(queued), "", rate, "", "", memory, ""]


def _rank_text(rank: RankRow) -> Text:
    waits = f" {duration(rank.pending_ms)}" if rank.pending_ms > LONG_MS else ""
    mark = " slow" if rank.slow else ""
    return Text(f"{rank.rank}:{one_line(rank.device)}:{rank.step}{waits}{mark}", style="bold red" if rank.slow else "")
