"""Checks of the models: replicas, files, kernels, faults, dead letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from control.clock import now_ms
from control.engines import ENGINES
from control.operations.checks.findings import Checks, Finding
from control.operations.checks.hosts import check_breaches, check_files
from control.placement.farm import HostCard
from control.placement.membership import HostFacts
from control.records import catalog
from control.records.api_reports import breaches_of
from control.records.backend import Backend
from control.redis.clients import SyncRedis
from control.redis.connection import run_every
from control.replicas import health, model_overviews
from control.replicas.memory_deaths import CAUSE
from control.requests.upkeep.dead import count_letters

# So many faults of a replica in the last hour are a warning.
FAULTS = 3
WITHIN_MS = 3_600_000


def check_models(client: SyncRedis, cards: Sequence[HostCard], facts: Mapping[str, HostFacts | None]) -> list[Finding]:
    """Raises RedisUnavailable."""
    overviews = model_overviews.overviews(client)
    if not overviews:
        checks = Checks("models")
        checks.warning("loaded", "no model is loaded", "Run `furrow models load MODEL`.")
        return checks.findings
    specs = {spec.name: spec for spec in catalog.list_specs(client)}
    letters = run_every(client, [count_letters(overview.model) for overview in overviews])
    breaches = breaches_of(client, [overview.model for overview in overviews])
    places = [(overview.model, replica.replica) for overview in overviews for replica in overview.replicas]
    faults = dict(zip(places, run_every(client, [health.poison_history(*place) for place in places]), strict=True))
    statuses = dict(zip(places, run_every(client, [health.status_of(*place) for place in places]), strict=True))
    findings: list[Finding] = []
    for overview, count in zip(overviews, letters, strict=True):
        checks = Checks("models", overview.model)
        check_replicas(overview, statuses, checks)
        if (spec := specs.get(overview.model)) is not None:
            check_files(spec, cards, facts, checks, {replica.detail for replica in overview.replicas})
            check_engine_versions(spec.engine, overview, checks)
        check_breaches(breaches[overview.model], checks)
        check_weights(overview, checks)
        check_backends(overview, checks)
        check_faults(overview, faults, checks)
        check_letters(overview.model, count, checks)
        findings += checks.findings
    return findings


def check_replicas(
    overview: model_overviews.Overview, statuses: Mapping[tuple[str, str], health.Status | None], checks: Checks
) -> None:
    """Every replica that is wanted serves."""
    name = overview.model
    serving = sum(replica.state == "loaded" for replica in overview.replicas)
    if overview.paused:
        message = f"paused: {overview.queued} requests wait, and none is begun"
        checks.warning("paused", message, f"Run `furrow models resume {name}`.")
    for replica in overview.replicas:
        status = statuses.get((name, replica.replica))
        if status is not None and status.state == "unplaceable":
            remedy = (
                f"Start `furrow worker` on a host that has what it needs, run `furrow drain HOST --undo`, or load it "
                f"with other settings: `furrow models load`, `furrow models scale {name} --replicas N`."
            )
            if " of memory; " in replica.detail:
                remedy += " `furrow models rebalance --dry-run` shows whether moving replicas makes room."
            checks.error("replicas", f"{replica.replica} has no place: {replica.detail}", remedy)
        elif replica.state == "failed":
            remedy = f"Repair the cause, then run `furrow models reload {name}`."
            if CAUSE in replica.detail:
                remedy = f"{memory_remedy(name)}, then run `furrow models reload {name}`."
            checks.error("replicas", f"{replica.replica} was given up: {replica.detail}", remedy)
        elif replica.state not in ("loaded", "draining", "unloading"):
            remedy = f"Wait; `furrow models list` and `furrow history {name}` show how far it is."
            if replica.detail == model_overviews.NO_WORKER:
                remedy = "Run `furrow worker` on a host that has free devices."
            if CAUSE in replica.detail:
                remedy = (
                    f"{memory_remedy(name)}; after the third such end in ten minutes the model loaded last is given up."
                )
            checks.warning("replicas", f"{replica.replica} is {replica.state}: {replica.detail}", remedy)
    if overview.state == "sleeping":
        checks.ok("replicas", f"it sleeps, {overview.queued} requests wait: {overview.detail}")
    elif serving >= overview.wanted:
        checks.ok("replicas", f"{serving} of {overview.wanted} serve, {overview.queued} requests wait")


def memory_remedy(model: str) -> str:
    """The remedy for a model whose ranks the kernel ends for lack of memory."""
    return (
        f"Load `{model}` again with --quant int8 or fewer --kv-tokens (`furrow models load`), unload another model of "
        "its host (`furrow hosts` lists them), or give the host or container more memory"
    )


def backends_of(overview: model_overviews.Overview) -> dict[str, Backend]:
    """The backends of the replicas that have loaded the model's present revision, by the replica's name."""
    current = (replica for replica in overview.replicas if replica.revision == overview.revision)
    return {replica.replica: replica.backend for replica in current if replica.backend is not None}


def check_weights(overview: model_overviews.Overview, checks: Checks) -> None:
    """The replicas of one revision loaded the same weights."""
    backends = backends_of(overview)
    if len({backend.weights for backend in backends.values()}) > 1:
        weights = ", ".join(f"{name}: {backend.weights}" for name, backend in backends.items())
        message = (
            "replicas serve different weights, so their answers differ: the model's files were changed while it was "
            f"served, or differ from host to host ({weights})"
        )
        remedy = (
            f"Make the files the same on every host, then run `furrow models reload {overview.model}`. Put new weights "
            "into a folder of their own."
        )
        checks.error("weights", message, remedy)


def check_backends(overview: model_overviews.Overview, checks: Checks) -> None:
    """The kernels that the replicas chose are the same."""
    kinds = {
        (tuple(backend.kernels), backend.collective, backend.dtype): name
        for name, backend in backends_of(overview).items()
    }
    words = {
        name: f"{dtype}, {', '.join(kernels)}" + (f", ranks over {collective}" if collective else "")
        for (kernels, collective, dtype), name in kinds.items()
    }
    differing = "; ".join(f"{name}: {text}" for name, text in words.items())
    if len(kinds) > 1:
        remedy = (
            "Use hosts of one kind, or load the model with --deterministic; `furrow selftest` on the slower host shows "
            "why it does without a kernel."
        )
        message = (
            f"replicas compute with different kernels, so equal requests may differ in their last bits ({differing})"
        )
        checks.warning("kernels", message, remedy)
    elif kinds:
        checks.ok("kernels", *words.values())


def check_engine_versions(engine: str, overview: model_overviews.Overview, checks: Checks) -> None:
    """The external engines of the replicas are of a version that was run under Furrow."""
    external = ENGINES.get(engine)
    if external is None:
        return
    for replica, backend in backends_of(overview).items():
        version = backend.engine_version
        if external.tried_version and version.startswith(external.tried_version):
            checks.ok("engine", f"{replica} runs {external.title} {version}")
        else:
            message = (
                f"{replica} runs {external.title} {version or 'of a version that it does not tell'}, and Furrow was "
                f"tried with {external.tried}"
            )
            remedy = (
                "Compare an answer with the engine's own before you rely on it: `python -m "
                f"ops.bench.recovery.survival --engine {engine}` does so while it kills the engine."
            )
            checks.warning("engine", message, remedy)


def check_faults(
    overview: model_overviews.Overview, faults: Mapping[tuple[str, str], list[health.Poison]], checks: Checks
) -> None:
    """Replicas that fail again and again, though each failure is repaired."""
    since = now_ms() - WITHIN_MS
    for replica in overview.replicas:
        recent = [poison for poison in faults.get((overview.model, replica.replica), []) if poison.epoch > since]
        if len(recent) >= FAULTS:
            last = recent[0]
            message = f"{replica.replica} had {len(recent)} faults in an hour, at last {last.kind}: {last.message}"
            remedy = f"See `furrow history {overview.model}` and the table of kinds in ops/runbook.md."
            if last.message.endswith("killed by SIGKILL"):
                remedy += (
                    " A SIGKILL without a reason is mostly for lack of memory (`dmesg` on the host): load the model "
                    "with --quant, fewer --kv-tokens or a smaller --max-context."
                )
            checks.warning("faults", message, remedy)


def check_letters(model: str, count: int, checks: Checks) -> None:
    if count:
        remedy = f"See their causes with `furrow dead list {model}`; `furrow dead retry` and `drop` take one away."
        noun = "request" if count == 1 else "requests"
        checks.warning("dead letters", f"{count} {noun} crashed the group when run alone", remedy)
