"""`furrow requests`: the requests that wait or run, of all tenants."""

from __future__ import annotations

import click

from control import requests as control_requests
from control.operations.options import connect_to_farm, redis_option
from control.records import catalog
from control.requests.upkeep.life import life_of
from ops.cli.tables import duration, echo_json, echo_line, echo_table, json_option

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
    found = control_requests.open_requests(client, catalog.model_names(client, model), MOST, tenant)
    if as_json:
        echo_json(found)
        return
    if not found:
        click.echo("No requests wait or run.")
        return
    header = ("ID", "MODEL", "STATE", "AGE", "TENANT", "PRIORITY", "PROMPT", "ANSWER", "ATTEMPTS", "REPLICA")
    rows = [
        (
            *(one.id, one.model, "cancelled" if one.cancelled else one.state, duration(one.age_ms), one.tenant),
            *(one.priority, str(one.prompt_tokens), str(one.completion_tokens), str(one.attempts), one.replica or "-"),
        )
        for one in found
    ]
    echo_table([header, *rows])


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
