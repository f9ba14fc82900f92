"""`furrow replay`: compute a request that was kept once more, and compare the tokens."""

from __future__ import annotations

import sys
import time
import uuid
from contextlib import suppress

import click

from control import requests
from control.errors import RequestNotFound
from control.messages import LogEntry
from control.operations.options import connect_to_farm, redis_option
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.requests.upkeep.life import bare_id
from control.requests.upkeep.replay import TENANT, Difference, KeptRequest, differences, find_kept, fingerprints
from control.requests.upkeep.replay import replay as compute_again
from ops.cli.tables import echo_line

TICK_S = 0.1


@click.command()
@click.argument("rid")
@click.option("--times", type=click.IntRange(1, 64), default=1, show_default=True, help="Copies that run together.")
@redis_option
def replay(rid: str, times: int, redis_url: str | None) -> None:
    """Compute the request RID once more and compare it with what was answered.

    Tokens, log probabilities and ends must be equal. RID is the id of an answer or of its request. The API must have
    kept it: `furrow api --keep-requests SECONDS`, or as a chat completion with `store`. The exit status is 1 where
    something differs.
    """
    client = connect_to_farm(redis_url)
    kept = find_kept(client, catalog.model_names(client), bare_id(rid))
    copies: list[str] = []
    try:
        for _ in range(times):
            copies.append(uuid.uuid4().hex)
            compute_again(client, kept, copies[-1])
        outcomes = [compare(kept, _answer(client, kept.model, copy)) for copy in copies]
    finally:
        for copy in copies:
            with suppress(RequestNotFound):  # it could not be enqueued
                run(client, requests.cancel(kept.model, copy, TENANT))
    for _, lines in outcomes:
        for line in lines:
            echo_line(line)
    if any(differs for differs, _ in outcomes):
        sys.exit(1)


def _answer(client: SyncRedis, model: str, rid: str) -> list[LogEntry]:
    """The log of the request, once it has ended."""
    while not run(client, requests.follow(model, rid, "", TENANT, 0, most=1)).ended:
        time.sleep(TICK_S)
    return [entry for page in requests.read_pages(client, model, rid) for entry in page]


def compare(kept: KeptRequest, entries: list[LogEntry]) -> tuple[bool, list[str]]:
    """True if one copy differs; and the outcome in lines."""
    found, then, now = differences(kept, entries), fingerprints(kept.entries), fingerprints(entries)
    lines = [_describe(one) for one in found]
    if then != now:
        known = [", ".join(names) or "unknown" for names in (then, now)]
        lines.insert(0, f"Another backend: {known[0]} then, {known[1]} now. The bits may differ.")
    if not found:
        tokens = sum(entry.token is not None for entry in entries)
        lines.append(f"The same {tokens} tokens in {kept.params.sampling.n} choices.")
    return bool(found), lines


def _describe(one: Difference) -> str:
    return f"choice {one.choice} differs at entry {one.position}: {_shown(one.then)} then, {_shown(one.now)} now"


def _shown(entry: LogEntry | None) -> str:
    if entry is None:
        return "nothing"
    words = [] if entry.token is None else [f"token {entry.token}"]
    words += [] if entry.logprobs is None else [f"log probability {entry.logprobs.chosen:g}"]
    words += [] if entry.finish is None else [f"end {entry.finish} ({entry.cause})" if entry.cause else entry.finish]
    return ", ".join(words) or "tokens of the prompt"
