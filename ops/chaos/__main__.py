"""`python -m ops.chaos`: the same as `furrow chaos`."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import msgspec

from control import logs
from control.errors import FurrowError
from control.messages import ModelSpec
from control.operations.options import connect_to_farm, redis_option
from control.operations.spec import DTYPES, build_spec
from control.records import catalog
from control.redis.clients import SyncRedis
from ops.bench.common.client import Base
from ops.bench.common.machine import describe
from ops.chaos import report
from ops.chaos.errors import ChaosError
from ops.chaos.faults import FAULTS, ON_ANY_FARM, suited
from ops.chaos.load import Load
from ops.chaos.prompts import questions
from ops.chaos.run import Struck, strike_all
from ops.chaos.sabotage import CONTROLS, FRAIL, Sabotage
from ops.chaos.schedule import schedule
from ops.chaos.system.replicated import TOPOLOGIES
from ops.chaos.system.target import LOG_ENTRIES, Target, private_target
from ops.chaos.system.view import View
from ops.demo import MODEL_DIR
from worker.repository.source import resolve

QUESTIONS = 16


@click.command(epilog=f"Kinds: {', '.join(FAULTS)}.")
@click.option("--kinds", help="Faults, comma between, or all.  [default: all; with --control its own]")
@click.option(
    "--control", type=click.Choice(list(CONTROLS)), help="Switch one safety mechanism off: then streams must break."
)
@click.option("--topology", type=click.Choice(TOPOLOGIES), default="server", show_default=True, help="Of its Redis.")
@click.option("--times", type=click.IntRange(1), default=3, show_default=True, help="Strikes of each kind.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the schedule and of what is asked.")
@click.option("--streams", type=click.IntRange(1), default=64, show_default=True, help="Always under way.")
@click.option("--length", type=click.IntRange(8), default=160, show_default=True, help="Tokens of a stream, at most.")
@click.option(
    "--log-entries",
    type=click.IntRange(1),
    default=LOG_ENTRIES,
    show_default=True,
    help="For large-log: logged entries of running requests when the leader is killed.",
)
@click.option("--url", "urls", multiple=True, help="Strike the farm behind this API; repeat for more of its APIs.")
@redis_option
@click.option("--model", default="demo", show_default=True, help="With --url: the model to ask and strike.")
@click.option("--source", default="demo", show_default=True, help="The model that is served.")
@click.option("--tp", type=click.IntRange(1), default=2, show_default=True, help="Ranks.")
@click.option("--devices", default="cpu", show_default=True, help="One per rank.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float64", show_default=True)
@click.option(
    "--report", "report_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures here."
)
@click.option("--log", "log_file", type=click.Path(dir_okay=False, path_type=Path), help="Keep the farm's log here.")
def chaos(
    kinds: str | None,
    control: str | None,
    topology: str,
    times: int,
    seed: int,
    streams: int,
    length: int,
    log_entries: int,
    urls: tuple[str, ...],
    redis_url: str | None,
    model: str,
    source: str,
    tp: int,
    devices: str,
    dtype: str,
    report_file: Path | None,
    log_file: Path | None,
) -> None:
    """Strike a farm again and again under streaming load; every stream must be that of an undisturbed run.

    Without --url it is a private one. A farm that runs already is struck by the kinds that need only its ranks'
    processes, which must be on this machine.

    Exit status 1 if a stream is not exact, if a strike can't be shown to have taken effect, or if the farm does not
    come back. With --control it is the other way round: 1 if every stream is exact all the same.
    """
    machine = describe()
    click.echo(machine)
    sabotage = CONTROLS[control] if control else None
    if sabotage is not None and urls:
        raise click.UsageError("--control breaks a farm on purpose: it starts its own, so leave --url out")
    names = chosen(
        kinds or (",".join(sabotage.kinds) if sabotage else "all"), list(ON_ANY_FARM) if urls else suited(topology)
    )
    with ExitStack() as stack:
        if urls:
            target: View = attached(connect_to_farm(redis_url), model, urls)
        else:
            spec = build_spec(
                source,
                name=None,
                tp=tp,
                devices=devices,
                dtype=dtype,
                max_context=None,
                kv_tokens=None,
                quant=None,
                demo=MODEL_DIR,
            )
            own = stack.enter_context(own_farm(spec, log_file, sabotage, topology, names))
            own.log_entries, target = log_entries, own
        struck, load, failure = run(target, names, times, seed, streams, length)
    for line in report.table(report.rows(struck, load.checked)):
        click.echo(line)
    exact = sum(not checked.findings for checked in load.checked)
    click.echo(f"seed {seed}: {exact} of {len(load.checked)} streams exact, {len(struck)} strikes")
    for stream in report.broken(load.checked, struck):
        click.echo(f"BROKEN {stream}")
    if report_file is not None:
        report_file.write_text(json.dumps(report.document(machine, seed, struck, load.checked), indent=1))
    if sabotage is not None:
        judge(sabotage, broken=len(load.checked) - exact)
        return
    if failure is not None:
        raise failure
    if not report.passed(struck, load.checked):
        sys.exit(1)


def judge(sabotage: Sabotage, broken: int) -> None:
    """A control has done its part where the checker found what must be there. Raises ChaosError elsewhere."""
    if not broken:
        raise ChaosError(f"every stream is exact although {sabotage.what}: this run can't find such harm")
    click.echo(f"as it must be: {broken} streams are broken, because {sabotage.what}")


@contextmanager
def own_farm(
    spec: ModelSpec, log_file: Path | None, sabotage: Sabotage | None, topology: str, kinds: Sequence[str]
) -> Iterator[Target]:
    """A private target in a folder that is gone afterwards, with what the `kinds` need."""
    with tempfile.TemporaryDirectory(prefix="furrow-chaos-") as name:
        folder = Path(name)
        if sabotage is None and set(kinds) & set(FRAIL.kinds):
            sabotage = FRAIL
        environment = sabotage.write(folder / "sabotage") if sabotage else {}
        if "given-up" in kinds:  # its files are damaged
            found = resolve(spec.source)
            for copy in ("model", "sole-model"):
                shutil.copytree(found, folder / copy)
            spec = msgspec.structs.replace(spec, source=str(folder / "model"))
        with private_target(spec, folder, log_file or folder / "log", environment, topology) as target:
            yield target


def attached(client: SyncRedis, model: str, urls: Sequence[str]) -> View:
    """The farm that serves `model` behind `urls`. Raises ChaosError where it does not, or not on this machine."""
    spec = catalog.get_spec(client, model)
    if spec is None:
        raise ChaosError(f"the farm does not know the model {model!r}; name one that it serves with --model")
    bases = [Base.of(url) for url in urls]
    target = View(spec, client, [(base.host, base.port) for base in bases])
    if len(here := target.rank_pids()) < spec.tp:
        raise ChaosError(f"of the {spec.tp} ranks of {model!r} only {sorted(here)} run on this machine and beat")
    return target


def run(
    target: View, kinds: list[str], times: int, seed: int, streams: int, length: int
) -> tuple[list[Struck], Load, ChaosError | None]:
    """What was struck, the load with every checked stream, and what ended the run before its time."""
    struck: list[Struck] = []
    load = Load(target.urls, questions(target.spec.name, seed, length, QUESTIONS), streams, seed)
    load.record()
    say(f"{len(load.expected)} undisturbed streams recorded")
    load.start()
    failure: ChaosError | None = None
    try:
        strike_all(target, load, schedule(kinds, times, seed), streams, struck, say)
        load.stop(target.until)
    except ChaosError as error:
        failure = error
    return struck, load, failure


def chosen(kinds: str, known: Sequence[str]) -> list[str]:
    """Raises click.BadParameter naming a kind that does not exist here."""
    names = list(known) if kinds == "all" else [name.strip() for name in kinds.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise click.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(known)}", param_hint="--kinds")
    return names


def say(line: str) -> None:
    click.echo(f"chaos: {line}", err=True)


def main() -> None:
    """A FurrowError becomes one clear line and exit status 1."""
    logs.configure("auto", "warning")
    try:
        chaos.main(prog_name="furrow chaos")
    except FurrowError as error:
        click.echo(f"furrow chaos: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
