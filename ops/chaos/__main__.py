"""`python -m ops.chaos`: the same as `furrow chaos`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import click
import msgspec

from control.engines import ENGINES, OWN
from control.errors import FurrowError
from control.messages import ModelSpec
from control.operations.options import connect_to_farm, redis_option
from control.operations.spec import DTYPES, build_spec
from control.records import catalog
from control.redis.clients import SyncRedis
from ops.chaos.errors import ChaosError
from ops.chaos.faults import FAULTS, ON_ANY_FARM, suited
from ops.chaos.load import Load, questions
from ops.chaos.replays import KEEP_S, noting, replay_some
from ops.chaos.run import StrikeRecord, document, lines, passed, schedule, strike_all
from ops.chaos.sabotage import CONTROLS, FRAIL
from ops.chaos.system.target import LOG_ENTRIES, TOPOLOGIES, Target, View, private_target
from ops.common.engine_options import ENGINE_OPTIONS, engine_environment, engine_options
from ops.common.sabotage import Sabotage
from ops.demo import MODEL_DIR
from ops.harness import scripted_engine as scripted
from ops.harness.client import Base
from ops.harness.program import FILE, describe, with_options
from ops.harness.program import run as run_program
from worker.repository.source import resolve

QUESTIONS = 16
ENOUGH_WITHIN_S = 600.0


@with_options
@redis_option
@engine_options
def chaos(
    kinds: Annotated[
        str | None, "Kinds of faults, separated by commas, or all.  [default: all; with --control its own]"
    ] = None,
    control: Annotated[
        str | None, click.Choice(list(CONTROLS)), "Switch one safety mechanism off; streams must then break."
    ] = None,
    topology: Annotated[str, click.Choice(TOPOLOGIES), "Kind of Redis."] = "server",
    times: Annotated[int, "Strikes of each kind."] = 3,
    seed: Annotated[int, int, "Seed of the schedule and of the requests."] = 1,
    streams: Annotated[int, "Streams at one time."] = 64,
    length: Annotated[int, click.IntRange(8), "Most tokens of a stream."] = 160,
    log_entries: Annotated[
        int, "For large-log: logged entries of running requests when the leader is killed."
    ] = LOG_ENTRIES,
    urls: Annotated[tuple[str, ...], "--url", "URL of an API process of a running farm to strike; repeatable."] = (),
    redis_url: str | None = None,
    model: Annotated[str, "With --url: the model to ask and strike."] = "demo",
    source: Annotated[str, "Model to serve: demo, a folder or a repository."] = "demo",
    tp: Annotated[int, "Ranks."] = 2,
    devices: Annotated[str, "One per rank."] = "cpu",
    dtype: Annotated[str, click.Choice(DTYPES)] = "float64",
    engine: Annotated[
        str,
        click.Choice([OWN, *ENGINES]),
        "External engine; a scripted one of its shape, unless --engine-command or --engine-python names it.",
    ] = OWN,
    replays: Annotated[
        int,
        "--replay",
        click.IntRange(0),
        "Requests to compute once more afterwards, with other threads and chunks; their logits must be the same.",
    ] = 0,
    report_file: Annotated[Path | None, "--report", FILE, "File for all figures, as JSON."] = None,
    log_file: Annotated[Path | None, "--log", FILE, "File for the farm's log."] = None,
    **engines: tuple[str, ...],
) -> None:
    """Inject faults into a farm under streaming load. Every stream must equal that of an undisturbed run.

    Without --url the command starts a private farm. With --url it strikes a running farm, by the kinds that need only
    the processes of its ranks, which must be on this machine.

    The exit status is 1 if a stream is not exact, if a strike has no proved effect, or if the farm does not recover.
    With --control it is 1 if every stream is exact, with --replay also if a token or a hash of logits differs.
    """
    machine = describe()
    same = True
    click.echo(machine)
    sabotage = CONTROLS[control] if control else None
    if sabotage is not None and urls:
        raise click.UsageError("--control needs a private farm, because it breaks streams: leave --url out")
    if engine != OWN and (urls or control or replays):
        raise click.UsageError("--engine goes with a private farm, without --control and --replay")
    possible = list(ON_ANY_FARM) if urls else suited(topology, engine)
    if replays:
        possible = without_sabotage(possible, dtype, urls or control)
    names = kinds_of(kinds or (",".join(sabotage.kinds) if sabotage else "all"), possible)
    with ExitStack() as stack:
        if urls:
            target: View = attached(connect_to_farm(redis_url), model, urls)
        else:
            if engine == OWN:
                spec = build_spec(source, tp=tp, devices=devices, dtype=dtype, demo=MODEL_DIR)
            else:
                spec = build_spec(source, engine=engine, demo=MODEL_DIR)
                os.environ.update(engine_environment(**engines) or scripted_environment(engine))
            own = stack.enter_context(own_farm(spec, log_file, sabotage, topology, names, bool(replays)))
            own.log_entries, target = log_entries, own
        records, load, failure = run(target, names, times, seed, streams, length, replays)
        if isinstance(target, Target) and replays and failure is None:
            same = replay_some(target, load.checked, replays, seed, say)
    for line in lines(seed, records, load.checked):
        click.echo(line)
    if report_file is not None:
        report_file.write_text(json.dumps(document(machine, seed, records, load.checked), indent=1))
    if sabotage is not None:
        judge(sabotage, broken=sum(bool(checked.findings) for checked in load.checked))
        return
    if failure is not None:
        raise failure
    if not (same and passed(records, load.checked)):
        sys.exit(1)


chaos.epilog = f"Kinds: {', '.join(FAULTS)}."


def scripted_environment(engine: str) -> dict[str, str]:
    """The environment of a worker whose engine is a scripted one, which computes a token in 15 ms."""
    words = [sys.executable, str(Path(scripted.__file__)), engine]
    options = {"engine_command": [f"{engine}={shlex.join(words)}"]}
    for other in ENGINE_OPTIONS:
        options.setdefault(other, [])
    return {"SCRIPTED_RATE": "65", **engine_environment(**options)}


def without_sabotage(kinds: Sequence[str], dtype: str, other: object) -> list[str]:
    """The kinds of faults that a run with --replay may have. Raises click.UsageError."""
    if other:
        raise click.UsageError("--replay needs a private farm that is whole: leave --url and --control out")
    if dtype != "float32":
        raise click.UsageError("--replay compares logits, which only the forward in C++ repeats: add --dtype float32")
    return [kind for kind in kinds if kind not in FRAIL.kinds]


def judge(sabotage: Sabotage, broken: int) -> None:
    """Check that a control broke streams. Raises ChaosError if it did not."""
    if not broken:
        raise ChaosError(f"every stream is exact although {sabotage.behaviour}: the checker does not find such harm")
    click.echo(f"as expected: {broken} streams are broken, because {sabotage.behaviour}")


@contextmanager
def own_farm(
    spec: ModelSpec, log_file: Path | None, sabotage: Sabotage | None, topology: str, kinds: Sequence[str], keeps: bool
) -> Generator[Target]:
    """A private target in a temporary folder, with the files that the `kinds` need. If `keeps`, it keeps requests, and
    hashes of logits."""
    with tempfile.TemporaryDirectory(prefix="furrow-chaos-") as name:
        folder = Path(name)
        if sabotage is None and set(kinds) & set(FRAIL.kinds):
            sabotage = FRAIL
        logits = folder / "logits"
        if keeps:
            logits.mkdir()
            sabotage = noting(logits)
        environment = sabotage.write(folder / "sabotage") if sabotage else {}
        if "given-up" in kinds:  # its files are damaged
            files = resolve(spec.source)
            for copy in ("model", "sole-model"):
                shutil.copytree(files, folder / copy)
            spec = msgspec.structs.replace(spec, source=str(folder / "model"))
        keep_s = KEEP_S if keeps else 0
        with private_target(spec, folder, log_file or folder / "log", environment, topology, keep_s) as target:
            target.logits = logits if keeps else None
            yield target


def attached(client: SyncRedis, model: str, urls: Sequence[str]) -> View:
    """The farm that serves `model` behind `urls`. Raises ChaosError if its ranks are not on this machine."""
    spec = catalog.get_spec(client, model)
    if spec is None:
        raise ChaosError(f"the farm does not know the model {model!r}; name one that it serves with --model")
    bases = [Base.of(url) for url in urls]
    target = View(spec, client, [(base.host, base.port) for base in bases])
    if len(here := target.rank_pids()) < spec.tp:
        raise ChaosError(f"of the {spec.tp} ranks of {model!r} only {sorted(here)} run on this machine and beat")
    return target


def run(
    target: View, kinds: list[str], times: int, seed: int, streams: int, length: int, least: int = 0
) -> tuple[list[StrikeRecord], Load, FurrowError | None]:
    """The strikes, the load with `least` checked streams or more, and the error that ended the run early."""
    records: list[StrikeRecord] = []
    load = Load(target.urls, questions(target.spec.name, seed, length, QUESTIONS), streams, seed)
    load.record()
    say(f"{len(load.expected)} undisturbed streams recorded")
    load.start()
    failure: FurrowError | None = None
    try:
        strike_all(target, load, schedule(kinds, times, seed), streams, records, say)
        target.until(lambda: len(load.checked) >= least, f"{least} streams have ended", ENOUGH_WITHIN_S)
        load.stop(target.until)
    except FurrowError as error:
        failure = error
    return records, load, failure


def kinds_of(kinds: str, possible: Sequence[str]) -> list[str]:
    """Raises click.BadParameter naming a kind that does not exist here."""
    names = list(possible) if kinds == "all" else [name.strip() for name in kinds.split(",")]
    if unknown := [name for name in names if name not in possible]:
        raise click.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(possible)}", param_hint="--kinds")
    return names


def say(line: str) -> None:
    click.echo(f"chaos: {line}", err=True)


if __name__ == "__main__":
    run_program(chaos, "furrow chaos")
