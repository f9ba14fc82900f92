"""`furrow models plan`: whether the memory of hosts is enough for a model, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
import msgspec

from control.errors import FurrowError, SettingsError
from control.messages import ModelSpec
from control.operations.options import connect_to_farm, redis_option
from control.operations.spec import build_spec
from control.placement import farm
from control.placement.need import DeviceRoom, HostFit, ModelNeed, RankNeed, fits_on, is_enough, most_kv_tokens
from control.placement.placement import Assign, Host, Room, place
from control.sizes import in_words
from ops.cli.options import model_options
from ops.cli.tables import echo_json, echo_line, echo_table, json_option
from ops.demo import MODEL_DIR

if TYPE_CHECKING:
    from worker.repository.files import ModelFiles  # the worker's modules are imported when a plan is made

OTHER_QUANTS = ("int8", "q8_0", "q6k", "q5k", "q4k", "q3k")
"""Quantizations to try for a model that does not fit, from the best answers down."""
LEAST_KV_TOKENS = 256
HERE = "this host"


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`ranks` are those of one replica on CPUs or on the devices that are named, `gpu_ranks` on GPUs; `remedies` what
    would make it fit where no host has the memory."""

    model: str
    tp: int
    kv_tokens: int
    ranks: list[RankNeed]
    gpu_ranks: list[RankNeed] = []
    hosts: list[HostFit]
    remedies: list[str]


@click.command()
@click.argument("model")
@model_options
@json_option
@redis_option
def plan(model: str, redis_url: str | None, as_json: bool, **options: Any) -> None:
    """Print what memory MODEL needs, and which hosts have it.

    The need follows from the headers of the model's files, on this host or on the hub; nothing is downloaded whole or
    loaded. Without --redis the memory is that which this host has free, else that of each host of the farm. On hosts
    with GPUs each rank needs one of them, unless --devices says otherwise; their needs are estimates. Status 1 where no
    host has enough.
    """
    spec = build_spec(model, demo=MODEL_DIR, **options)
    memory_plan = make_plan(spec, free_memory(redis_url))
    if as_json:
        echo_json(memory_plan)
    else:
        _print(memory_plan)
    if not is_enough(memory_plan.hosts, memory_plan.tp):
        raise SystemExit(1)


def free_memory(redis_url: str | None) -> list[DeviceRoom]:
    """The memory that ranks may still take on this host, or on the hosts of the farm that is named."""
    if redis_url is None:
        from control.host_memory import available
        from worker.agent.devices import device_memory

        gpus = [DeviceRoom(HERE, space.free, device) for device, space in device_memory().items()]
        return [DeviceRoom(HERE, available()), *gpus]
    free = farm.free_memory(connect_to_farm(redis_url))
    if not free:
        raise SettingsError("no worker is alive: run `furrow worker` on a host, or leave --redis out")
    return free


def make_plan(spec: ModelSpec, rooms: Sequence[DeviceRoom]) -> MemoryPlan:
    """Of a repository that is not on this host the headers are read from the hub. Raises what a load raises for a
    model's files, and HubUnreachable."""
    from worker.repository import remote_headers, source

    place = source.on_this_host(spec.source, spec.gguf)
    if place is not None:
        return _plan_of(spec, place, rooms)
    with TemporaryDirectory(prefix="furrow-headers-") as folder:
        return _plan_of(spec, remote_headers.headers_of(spec.source, Path(folder), spec.gguf), rooms)


def _plan_of(spec: ModelSpec, place: Path, rooms: Sequence[DeviceRoom]) -> MemoryPlan:
    from worker.repository import validation

    files = validation.inspect(place, spec.images)
    validation.check(files.config, spec.tp, spec.max_context, spec.quant)
    need = need_of(spec, files)
    fits = fits_on(need, spec.devices, rooms)
    return MemoryPlan(
        model=spec.name,
        tp=spec.tp,
        kv_tokens=need.ranks[0].kv_tokens,
        ranks=need.ranks,
        gpu_ranks=need.gpu_ranks if any(fit.device != "cpu" for fit in fits) else [],
        hosts=fits,
        remedies=[] if is_enough(fits, spec.tp) else _remedies(spec, files, need, fits),
    )


def need_of(spec: ModelSpec, files: ModelFiles) -> ModelNeed:
    """The need of each rank of a replica."""
    from worker.agent.needs import need_of

    return need_of(spec, files)


def needs_of(spec: ModelSpec, files: ModelFiles) -> list[RankNeed]:
    """The need of each rank of a replica on CPUs, or on the devices that are named."""
    return need_of(spec, files).ranks


def _remedies(spec: ModelSpec, files: ModelFiles, need: ModelNeed, fits: Sequence[HostFit]) -> list[str]:
    """Changes of the specification, one at a time or a quantization with fewer KV tokens, with which one host has
    enough; and the ranks on several hosts."""
    on_cpus = [fit.has for fit in fits if fit.device == "cpu"]
    remedies = _gpu_remedies(spec, need, [fit for fit in fits if fit.device != "cpu"])
    if on_cpus:
        remedies += _cpu_remedies(spec, files, need.ranks, on_cpus)
    return list(dict.fromkeys(remedies))


def _gpu_remedies(spec: ModelSpec, need: ModelNeed, fits: Sequence[HostFit]) -> list[str]:
    """Fewer KV tokens with which each rank has its GPU on one host."""
    has: dict[str, list[int]] = {}
    for fit in fits:
        has.setdefault(fit.host, []).append(fit.has)
    least = [sorted(own, reverse=True)[spec.tp - 1] for own in has.values() if len(own) >= spec.tp]
    if not least or not need.gpu_ranks:
        return []
    fewer = min(most_kv_tokens([rank], max(least)) for rank in need.gpu_ranks)
    return [f"--kv-tokens {fewer}"] if fewer >= LEAST_KV_TOKENS else []


def _cpu_remedies(spec: ModelSpec, files: ModelFiles, ranks: Sequence[RankNeed], free: Sequence[int]) -> list[str]:
    largest = max(free)
    remedies = list[str]()
    fewer = _most_kv_tokens(spec, files, ranks, largest)
    if fewer >= LEAST_KV_TOKENS:
        remedies.append(f"--kv-tokens {fewer}")
    remedies += _quantized(spec, files, largest, fewer)
    if spec.tp > 1:
        shares = sorted((rank.total for rank in ranks), reverse=True)
        if len(free) >= spec.tp and all(s <= f for s, f in zip(shares, sorted(free, reverse=True), strict=False)):
            remedies.append("--spread, with its ranks on several hosts")
        elif units := _uneven(spec, files, free):
            remedies.append(f"uneven shares on {spec.tp} hosts, {units} parts of the model, as a farm gives them")
    elif remedy := _split(spec, files, sorted(free, reverse=True)):
        remedies.append(remedy)
    return remedies


def _uneven(spec: ModelSpec, files: ModelFiles, free: Sequence[int]) -> str:
    """The parts of the model that ranks on hosts with so much memory get, where even ones don't fit; else empty."""
    from worker.agent.needs import uneven_need_of

    hosts = [Host(f"{index:04}", memory=size) for index, size in enumerate(free)]
    room = Room(hosts, {spec.name: uneven_need_of(spec, files)})
    shares = [action.assignment.shares for action in place(spec, "r0", {}, room) if isinstance(action, Assign)]
    return ":".join(map(str, shares[0])) if shares else ""


def _most_kv_tokens(spec: ModelSpec, files: ModelFiles, ranks: Sequence[RankNeed], free: int) -> int:
    """The most with which all ranks fit. What a step works in grows with the sequences that they allow."""
    fits = most_kv_tokens(ranks, free)
    if fits < LEAST_KV_TOKENS:
        return fits
    most = most_kv_tokens(needs_of(msgspec.structs.replace(spec, kv_tokens=fits), files), free) + 1
    while most - fits > 1:
        middle = (fits + most) // 2
        needs = needs_of(msgspec.structs.replace(spec, kv_tokens=middle), files)
        if sum(need.total for need in needs) <= free:
            fits = middle
        else:
            most = middle
    return fits


def _quantized(spec: ModelSpec, files: ModelFiles, largest: int, fewer: int) -> list[str]:
    """The first quantization that fits, or the smallest with fewer KV tokens where those are more than `fewer`, which
    fit without it."""
    if spec.quant is not None or spec.dtype not in ("auto", "float32") or any(d != "cpu" for d in spec.devices):
        return []
    ranks = list[RankNeed]()
    for quant in OTHER_QUANTS:
        try:
            ranks = needs_of(msgspec.structs.replace(spec, quant=quant), files)
        except FurrowError:  # one that this model is not offered in
            continue
        if sum(rank.total for rank in ranks) <= largest:
            return [f"--quant {quant}"]
    tokens = most_kv_tokens(ranks, largest)
    return [f"--quant {OTHER_QUANTS[-1]} --kv-tokens {tokens}"] if tokens >= max(LEAST_KV_TOKENS, 2 * fewer) else []


def _split(spec: ModelSpec, files: ModelFiles, free: Sequence[int]) -> str | None:
    """The fewest ranks, each on a host of its own, that fit."""
    from worker.repository import validation

    for tp in (2, 4, 8):
        if tp > len(free):
            return None
        split = msgspec.structs.replace(spec, tp=tp, devices=spec.devices * tp)
        try:
            validation.check(files.config, tp, spec.max_context, spec.quant)
            shares = sorted((need.total for need in needs_of(split, files)), reverse=True)
        except FurrowError:  # its heads can't be divided so
            continue
        if all(share <= has for share, has in zip(shares, free, strict=False)):
            return f"--tp {tp} --spread, with a rank on each of {tp} hosts"
    return None


def _print(plan: MemoryPlan) -> None:
    on_cpus = any(fit.device == "cpu" for fit in plan.hosts) or not plan.gpu_ranks
    if on_cpus:
        _print_need(plan, plan.ranks[0], "" if not plan.gpu_ranks else " on CPUs")
    if plan.gpu_ranks:
        _print_need(plan, plan.gpu_ranks[0], " on a GPU")
    rows = [("HOST", "NEEDS", "HAS", "")]
    for fit in plan.hosts:
        verdict = "fits" if fit.fits else f"{in_words(fit.needs - fit.has)} too little"
        name = fit.host if fit.device == "cpu" else f"{fit.host} {fit.device}"
        rows.append((name, in_words(fit.needs), in_words(fit.has), verdict))
    echo_table(rows)
    for remedy in plan.remedies:
        echo_line(f"It fits with {remedy}.")
    if not plan.remedies and not is_enough(plan.hosts, plan.tp):
        echo_line("Neither fewer KV tokens nor a quantization nor the ranks on several of these hosts make it fit.")


def _print_need(plan: MemoryPlan, rank: RankNeed, suffix: str) -> None:
    about = "" if rank.exact else "about "
    tokens = f" for {plan.kv_tokens:,} tokens" if rank.kv else ""
    parts = (
        f"weights {about}{in_words(rank.weights)}",
        f"KV memory {in_words(rank.kv)}{tokens}",
        f"a step {in_words(rank.step)}",
        f"the process {in_words(rank.process)}",
    )
    whose = "it" if plan.tp == 1 else f"each of its {plan.tp} ranks"
    echo_line(f"{plan.model}: {whose} needs {about}{in_words(rank.total)}{suffix}: {', '.join(parts)}.")
