"""`python -m ops.compat`: install the clients, run them against a farm, write the page about them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import click

from control.errors import SettingsError
from ops.compat import clients
from ops.compat.clients import CLIENTS, Client, find_client
from ops.compat.leader_faults import KEEP_ALIVE_S, leader_faults
from ops.compat.runs import ClientRun, judged, page, run
from ops.compat.scripted import DEMONSTRATION, FORMS, scripted_farm
from ops.harness.farm import DEMO, demo_spec, private_farm
from ops.harness.program import run as run_program

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def compat() -> None:
    """Real clients, each in an environment of its own, put to work on a farm."""


@compat.command("list")
def list_clients() -> None:
    """List the clients, and the version of each that is installed."""
    for client in CLIENTS:
        click.echo(f"{client.name:16} {clients.version(client) or 'not installed':16} {client.title}")


@compat.command()
@click.argument("names", nargs=-1)
def install(names: tuple[str, ...]) -> None:
    """Install the named clients, or all of them."""
    for client in _clients_of(names):
        click.echo(f"{client.name}: {', '.join(client.packages)}", err=True)
        click.echo(f"{client.name} {clients.install(client)}")


@compat.command("run")
@click.argument("names", nargs=-1)
@click.option("--base-url", help="Of a farm that runs, with /v1; without it one is started.")
@click.option("--form", type=click.Choice(FORMS), default=DEMONSTRATION, help="How the model that takes orders writes.")
@click.option("--write", is_flag=True, help="Write docs/compatibility.md; takes a run of all clients.")
def run_clients(names: tuple[str, ...], base_url: str | None, form: str, write: bool) -> None:
    """Run the named clients, or all that are installed; exit status 1 where one does what it should not."""
    runnable = [client for client in _clients_of(names) if names or clients.missing(client) is None]
    absent = [why for client in runnable if (why := clients.missing(client)) is not None]
    if absent or not runnable:
        raise SettingsError("; ".join(absent) or "No client is installed: python -m ops.compat install")
    if write and len(runnable) < len(CLIENTS):
        raise SettingsError("--write takes a run of all clients: python -m ops.compat install")
    with (
        tempfile.TemporaryDirectory(prefix="furrow-compat-") as data,
        scripted_farm(DEMO, Path(data), form=form) as scripted_url,
        _farm(base_url) as (url, fault_url),
    ):
        runs = [_run_one(client, url, fault_url, f"{scripted_url}/v1") for client in runnable]
    for other in FORMS if form == DEMONSTRATION else ():
        if other != DEMONSTRATION:
            _run_form(other, [client_run for client_run in runs if client_run.client.orders])
    if write:
        PAGE.write_text(page(runs))
    sys.exit(any(client_run.faults for client_run in runs))


def _run_one(client: Client, url: str, fault_url: str, scripted_url: str) -> ClientRun:
    more = {"fault_url": fault_url, "scripted_url": scripted_url}
    client_run = judged(client, lambda samples: run(client, url, DEMO, samples=samples, **more))
    _show(client_run)
    for fault in client_run.faults:
        click.echo(f"  FAULT {fault}", err=True)
    return client_run


def _show(client_run: ClientRun) -> None:
    click.echo(f"{client_run.client.name} {client_run.version}")
    for result in client_run.results:
        verdict = result.verdict(client_run.client)
        click.echo(f"  {verdict:7} {result.check}" + ("" if result.ok else f": {result.detail[-300:]}"))


def _run_form(form: str, runs: list[ClientRun]) -> None:
    """Add the tool loops of agents on the model that writes in `form` to their runs."""
    if not runs:
        return
    with (
        tempfile.TemporaryDirectory(prefix="furrow-compat-") as data,
        scripted_farm(DEMO, Path(data), form=form) as url,
    ):
        for client_run in runs:
            loops = run(client_run.client, f"{url}/v1", DEMO, scripted_url=f"{url}/v1", form=form)
            _show(loops)
            client_run.results.extend(loops.results)


@contextmanager
def _farm(base_url: str | None) -> Generator[tuple[str, str]]:
    """The base URL, and that of `leader_faults`: only of a farm that is started here."""
    if base_url is not None:
        yield base_url, ""
        return
    with (
        private_farm(demo_spec(tp=2, dtype="float64"), "--keep-alive", str(KEEP_ALIVE_S)) as farm,
        leader_faults(farm.redis_url, DEMO) as fault_url,
    ):
        yield f"{farm.url}/v1", fault_url


def _clients_of(names: tuple[str, ...]) -> list[Client]:
    clients = [find_client(name) for name in names] if names else list(CLIENTS)
    unknown = [name for name, client in zip(names, clients, strict=False) if client is None]
    if unknown:
        raise SettingsError(f"Unknown client {unknown[0]!r}; known are {', '.join(client.name for client in CLIENTS)}.")
    return [client for client in clients if client is not None]


if __name__ == "__main__":
    run_program(compat, "python -m ops.compat")
