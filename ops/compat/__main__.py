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
from ops.compat.clients import CLIENTS, Client, client
from ops.compat.leader_faults import KEEP_ALIVE_S, leader_faults
from ops.compat.runs import Run, judged, page, run
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
    for one in CLIENTS:
        click.echo(f"{one.name:16} {clients.version(one) or 'not installed':16} {one.title}")


@compat.command()
@click.argument("names", nargs=-1)
def install(names: tuple[str, ...]) -> None:
    """Install the named clients, or all of them."""
    for chosen in _chosen(names):
        click.echo(f"{chosen.name}: {', '.join(chosen.packages)}", err=True)
        click.echo(f"{chosen.name} {clients.install(chosen)}")


@compat.command("run")
@click.argument("names", nargs=-1)
@click.option("--base-url", help="Of a farm that runs, with /v1; without it one is started.")
@click.option("--form", type=click.Choice(FORMS), default=DEMONSTRATION, help="How the model that takes orders writes.")
@click.option("--write", is_flag=True, help="Write docs/compatibility.md; takes a run of all clients.")
def run_clients(names: tuple[str, ...], base_url: str | None, form: str, write: bool) -> None:
    """Run the named clients, or all that are installed; exit status 1 where one does what it should not."""
    chosen = [one for one in _chosen(names) if names or clients.missing(one) is None]
    absent = [why for one in chosen if (why := clients.missing(one)) is not None]
    if absent or not chosen:
        raise SettingsError("; ".join(absent) or "No client is installed: python -m ops.compat install")
    if write and len(chosen) < len(CLIENTS):
        raise SettingsError("--write takes a run of all clients: python -m ops.compat install")
    with (
        tempfile.TemporaryDirectory(prefix="furrow-compat-") as data,
        scripted_farm(DEMO, Path(data), form=form) as scripted_url,
        _farm(base_url) as (url, fault_url),
    ):
        runs = [_run_one(one, url, fault_url, f"{scripted_url}/v1") for one in chosen]
    for other in FORMS if form == DEMONSTRATION else ():
        if other != DEMONSTRATION:
            _run_form(other, [done for done in runs if done.client.orders])
    if write:
        PAGE.write_text(page(runs))
    sys.exit(any(done.faults for done in runs))


def _run_one(chosen: Client, url: str, fault_url: str, scripted_url: str) -> Run:
    more = {"fault_url": fault_url, "scripted_url": scripted_url}
    done = judged(chosen, lambda samples: run(chosen, url, DEMO, samples=samples, **more))
    _show(done)
    for fault in done.faults:
        click.echo(f"  FAULT {fault}", err=True)
    return done


def _show(done: Run) -> None:
    click.echo(f"{done.client.name} {done.version}")
    for result in done.results:
        verdict = result.verdict(done.client)
        click.echo(f"  {verdict:7} {result.check}" + ("" if result.ok else f": {result.detail[-300:]}"))


def _run_form(form: str, runs: list[Run]) -> None:
    """Add the tool loops of agents on the model that writes in `form` to their runs."""
    if not runs:
        return
    with (
        tempfile.TemporaryDirectory(prefix="furrow-compat-") as data,
        scripted_farm(DEMO, Path(data), form=form) as url,
    ):
        for done in runs:
            loops = run(done.client, f"{url}/v1", DEMO, scripted_url=f"{url}/v1", form=form)
            _show(loops)
            done.results.extend(loops.results)


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


def _chosen(names: tuple[str, ...]) -> list[Client]:
    clients_of = [client(name) for name in names] if names else list(CLIENTS)
    unknown = [name for name, one in zip(names, clients_of, strict=False) if one is None]
    if unknown:
        raise SettingsError(f"Unknown client {unknown[0]!r}; known are {', '.join(one.name for one in CLIENTS)}.")
    return [one for one in clients_of if one is not None]


if __name__ == "__main__":
    run_program(compat, "python -m ops.compat")
