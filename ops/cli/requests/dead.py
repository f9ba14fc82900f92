"""`furrow dead`: dead letters, which are requests that crashed their group when they ran alone."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

import click
import msgspec

from api.schemas.farm import letter_card
from control import requests
from control.operations.options import connect_to_farm, redis_option
from control.redis.connection import run
from control.requests import DeadLetter
from ops.cli.tables import echo_json, echo_line, json_option


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
    letters = run(connect_to_farm(redis_url), requests.dead_letters(model))
    if as_json:
        echo_json([letter_card(model, letter) for letter in letters])
        return
    if not letters:
        echo_line(f"No dead letters of '{model}'.")
    for letter in letters:
        echo_line(f"{_when(letter)}  {letter.rid}  {letter.prompt_tokens:>7}  {letter.cause}")


@dead.command()
@click.argument("model")
@click.argument("rid")
@json_option
@redis_option
def show(model: str, rid: str, as_json: bool, redis_url: str | None) -> None:
    """Show the dead letter RID of MODEL as JSON, with or without --json.

    It has the prompt and all parameters of the request.
    """
    letter = requests.dead_letter(connect_to_farm(redis_url), model, rid)
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
    again = requests.retry_letter(client, model, requests.dead_letter(client, model, rid), uuid.uuid4().hex)
    echo_line(f"{rid} is tried again as {again}.")


@dead.command()
@click.argument("model")
@click.argument("rid")
@redis_option
def drop(model: str, rid: str, redis_url: str | None) -> None:
    """Delete the dead letter RID of MODEL."""
    client = connect_to_farm(redis_url)
    run(client, requests.drop_letter(model, requests.dead_letter(client, model, rid)))
    echo_line(f"{rid} is dropped.")


def _when(letter: DeadLetter) -> str:
    return datetime.fromtimestamp(letter.at_ms / 1000, UTC).isoformat(timespec="seconds")
