"""Requests of all tenants: those that run, dead letters, and requests that are computed once more (`furrow requests`,
`furrow dead`, `furrow replay`)."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

import click
import msgspec

from api.schemas.farm import letter_card
from control import requests as control_requests
from control.errors import RequestNotFound
from control.messages import LogEntry
from control.operations.options import connect_to_farm, redis_option
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.requests.upkeep.replay import TENANT, Difference, KeptRequest, differences, find_kept, fingerprints
from control.requests.upkeep.replay import replay as compute_again
from control.requests.upkeep.running import OpenRequest, bare_id, life_of
from ops.cli.tables import duration, echo_json, echo_line, echo_list, json_option, utc

MOST = 1_000


@click.group()
def requests() -> None:
    """List, show and cancel requests of all tenants."""


@requests.command(name="list")
@click.option("--model", help="Requests of this model only.")
@click.option("--tenant", help="Requests of this tenant only.")
@json_option
@redis_option
def list_requests(model: str | None, tenant: str | None, as_json: bool, redis_url: str | None) -> None:
    """List the oldest 1,000 requests that wait or run, oldest first."""
    client = connect_to_farm(redis_url)
    open_requests = control_requests.open_requests(client, catalog.model_names(client, model), MOST, tenant)
    echo_list(open_requests, COLUMNS, "No requests wait or run.", as_json)


COLUMNS: dict[str, Callable[[OpenRequest], object]] = {
    "ID": lambda request: request.id,
    "MODEL": lambda request: request.model,
    "STATE": lambda request: "cancelled" if request.cancelled else request.state,
    "AGE": lambda request: duration(request.age_ms),
    "TENANT": lambda request: request.tenant,
    "PRIORITY": lambda request: request.priority,
    "PROMPT": lambda request: request.prompt_tokens,
    "ANSWER": lambda request: request.completion_tokens,
    "ATTEMPTS": lambda request: request.attempts,
    "REPLICA": lambda request: request.replica or "-",
}


@requests.command()
@click.argument("rid")
@json_option
@redis_option
def show(rid: str, as_json: bool, redis_url: str | None) -> None:
    """Show the phases of the request RID, the epochs that had it, and the faults that it met.

    A request is kept for two minutes after its end.
    """
    client = connect_to_farm(redis_url)
    life = life_of(client, catalog.model_names(client), rid)
    if as_json:
        echo_json(life)
        return
    echo_line(f"{life.id}: {life.state}" + (f" ({life.cause})" if life.cause else ""))
    echo_line(f"  model {life.model}, replica {life.replica or '-'}, attempts {life.attempts}, choices {life.choices}")
    echo_line(f"  tenant {life.tenant}, key {life.key or '-'}, priority {life.priority}")
    cached = f" ({life.cached_tokens} cached)" if life.cached_tokens else ""
    echo_line(f"  prompt {life.prompt_tokens} tokens{cached}, answer {life.completion_tokens} tokens")
    begin = life.phases[0].at_ms if life.phases else 0
    for phase in life.phases:
        detail = f"  {phase.detail}" if phase.detail else ""
        echo_line(f"  {'+' + duration(phase.at_ms - begin):>10}  {phase.name}{detail}")


@requests.command()
@click.argument("rid")
@redis_option
def cancel(rid: str, redis_url: str | None) -> None:
    """End the request RID: at once while it waits, with its next step while it runs."""
    client = connect_to_farm(redis_url)
    state = control_requests.cancel_any(client, catalog.model_names(client), rid)
    echo_line(f"{rid}: {'ends with its next step' if state == 'running' else f'is {state}'}.")


# --- dead letters -----------------------------------------------------------------------------------------------------


@click.group()
def dead() -> None:
    """List, show, retry and drop dead letters: requests that crashed their group when they ran alone."""


@dead.command(name="list")
@click.argument("model")
@json_option
@redis_option
def list_dead(model: str, as_json: bool, redis_url: str | None) -> None:
    """List the dead letters of MODEL.

    A line has time, request id, tokens of the prompt and cause; the newest is first.
    """
    letters = run(connect_to_farm(redis_url), control_requests.dead_letters(model))
    if as_json:
        echo_json([letter_card(model, letter) for letter in letters])
        return
    if not letters:
        echo_line(f"No dead letters of '{model}'.")
    for letter in letters:
        echo_line(f"{utc(letter.at_ms / 1000)}  {letter.rid}  {letter.prompt_tokens:>7}  {letter.cause}")


@dead.command(name="show")
@click.argument("model")
@click.argument("rid")
@json_option
@redis_option
def show_dead(model: str, rid: str, as_json: bool, redis_url: str | None) -> None:
    """Show the dead letter RID of MODEL as JSON, with or without --json.

    It has the prompt and all parameters of the request.
    """
    letter = control_requests.dead_letter(connect_to_farm(redis_url), model, rid)
    echo_json(msgspec.to_builtins(letter_card(model, letter)) | {"params": letter.params})


@dead.command()
@click.argument("model")
@click.argument("rid")
@redis_option
def retry(model: str, rid: str, redis_url: str | None) -> None:
    """Enqueue the request RID of MODEL again.

    It gets a new id, and its dead letter is dropped.
    """
    client = connect_to_farm(redis_url)
    again = control_requests.retry_letter(
        client, model, control_requests.dead_letter(client, model, rid), uuid.uuid4().hex
    )
    echo_line(f"{rid} is tried again as {again}.")


@dead.command()
@click.argument("model")
@click.argument("rid")
@redis_option
def drop(model: str, rid: str, redis_url: str | None) -> None:
    """Delete the dead letter RID of MODEL."""
    client = connect_to_farm(redis_url)
    run(client, control_requests.drop_letter(model, control_requests.dead_letter(client, model, rid)))
    echo_line(f"{rid} is dropped.")


# --- replays ----------------------------------------------------------------------------------------------------------


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
    original = find_kept(client, catalog.model_names(client), bare_id(rid))
    copies: list[str] = []
    try:
        for _ in range(times):
            copies.append(uuid.uuid4().hex)
            compute_again(client, original, copies[-1])
        outcomes = [compare(original, _answer(client, original.model, copy)) for copy in copies]
    finally:
        for copy in copies:
            with suppress(RequestNotFound):  # it could not be enqueued
                run(client, control_requests.cancel(original.model, copy, TENANT))
    for _, lines in outcomes:
        for line in lines:
            echo_line(line)
    if any(differs for differs, _ in outcomes):
        sys.exit(1)


def _answer(client: SyncRedis, model: str, rid: str) -> list[LogEntry]:
    """The log of the request, once it has ended."""
    while not run(client, control_requests.follow(model, rid, "", TENANT, 0, most=1)).ended:
        time.sleep(TICK_S)
    return [entry for page in control_requests.read_pages(client, model, rid) for entry in page]


def compare(original: KeptRequest, entries: list[LogEntry]) -> tuple[bool, list[str]]:
    """True if one copy differs; and the outcome in lines."""
    changes = differences(original, entries)
    then = fingerprints(original.entries)
    now = fingerprints(entries)
    lines = [_describe(difference) for difference in changes]
    if then != now:
        words = [", ".join(names) or "unknown" for names in (then, now)]
        lines.insert(0, f"Another backend: {words[0]} then, {words[1]} now. The bits may differ.")
    if not changes:
        tokens = sum(entry.token is not None for entry in entries)
        lines.append(f"The same {tokens} tokens in {original.params.sampling.n} choices.")
    return bool(changes), lines


def _describe(difference: Difference) -> str:
    place = f"choice {difference.choice} differs at entry {difference.position}"
    return f"{place}: {_shown(difference.then)} then, {_shown(difference.now)} now"


def _shown(entry: LogEntry | None) -> str:
    if entry is None:
        return "nothing"
    words = [] if entry.token is None else [f"token {entry.token}"]
    words += [] if entry.logprobs is None else [f"log probability {entry.logprobs.chosen:g}"]
    words += [] if entry.finish is None else [f"end {entry.finish} ({entry.cause})" if entry.cause else entry.finish]
    return ", ".join(words) or "tokens of the prompt"
