"""Checks of the hosts, and of the models' files that they have, by heartbeats and the facts that agents publish."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

import msgspec

from control.listening import is_loopback
from control.messages import ModelSpec
from control.operations.checks.findings import Checks, Finding
from control.placement.farm import HostCard
from control.placement.membership import ApiRecord, FilesHere, HostFacts, Space
from control.records.api_reports import CALLS, Breach
from control.sizes import in_words
from control.version import VERSION

SKEW_MS = 2_000
"""More is a warning. Furrow's own times are those of Redis; certificates, keys and logs go by the hosts' clocks."""
# Free bytes of a disk below which there is a warning, and an error.
LITTLE = 10 * 2**30
TOO_LITTLE = 2**30
LITTLE_CACHE = 2 * 2**30
TOO_LITTLE_CACHE = 2**28
# Bytes of /dev/shm: Docker's default of 64 MiB is too small for several groups of ranks.
SHARED_TOTAL = 2**28
SHARED_FREE = 2**25

ACCEPTS_WITHIN_S = 1.0
ANSWERS_WITHIN_S = 4.0
"""/ready waits for a Redis that does not answer."""
LONGEST_ANSWER = 2**20
HERE = "this command"


def check_hosts(
    cards: list[HostCard],
    facts: Mapping[str, HostFacts | None],
    apis: Mapping[str, str],
    skew_ms: int,
    silent: Sequence[ApiRecord] = (),
) -> list[Finding]:
    """`apis`: the version of each API process that beats; `silent`: those that were not stopped and don't beat;
    `skew_ms`: this host's clock minus that of Redis."""
    farm = Checks("hosts")
    alive = [card for card in cards if card.alive]
    if not alive:
        farm.error("alive", "no host is there: no model can be served", "Run `furrow worker` on each host.")
    elif all(card.drained for card in alive):
        remedy = f"Run `furrow drain {alive[0].id} --undo`."
        farm.error("drained", "every host is drained: no replica can be placed", remedy)
    if not apis:
        farm.warning("api", "no API process is there: clients can't connect", "Run `furrow api` on any host.")
    check_silent_apis(silent, farm)
    check_versions(cards, facts, apis, farm)
    clocks = {name: own.clock_ms for name, own in facts.items() if own is not None}
    check_clocks(clocks | {HERE: skew_ms}, farm)
    return [*farm.findings, *(one for card in cards for one in check_host(card, facts.get(card.id)))]


def check_versions(
    cards: list[HostCard], facts: Mapping[str, HostFacts | None], apis: Mapping[str, str], checks: Checks
) -> None:
    """The builds of all processes that beat, and of this command."""
    versions = {f"host {card.id}": card.version or "unknown" for card in cards if card.alive}
    versions |= {f"API {name}": version or "unknown" for name, version in apis.items()}
    versions[HERE] = VERSION
    if len(set(versions.values())) == 1:
        checks.ok("version", f"Furrow {VERSION} everywhere")
        return
    by_version: dict[str, list[str]] = {}
    for name, version in versions.items():
        by_version.setdefault(version, []).append(name)
    builds = "; ".join(f"{version}: {_first_few(names)}" for version, names in sorted(by_version.items()))
    programs = [
        f"`{one.program}` on {card.id}"
        for card in cards
        if card.alive and card.version != VERSION and (one := facts.get(card.id)) and one.program
    ]
    starts = (
        f" SIGUSR2 runs {_first_few(programs)}: see that `--version` of it names the new build." if programs else ""
    )
    remedy = (
        "Install one version everywhere, send SIGUSR2 to `furrow worker` on each host, and restart the API processes "
        f"one by one (docs/deployment.md, Upgrades).{starts}"
    )
    checks.warning("version", f"several builds of Furrow run: {builds}", remedy)


def check_ranks(card: HostCard, facts: HostFacts, checks: Checks) -> None:
    """Ranks keep their build when the agent is replaced."""
    if facts.old_ranks:
        models = sorted({name.partition(":")[0] for name in facts.old_ranks})
        ranks = _first_few([f"{name} ({version})" for name, version in sorted(facts.old_ranks.items())])
        remedy = f"Run {', '.join(f'`furrow models reload {name}`' for name in models)}; no request fails."
        message = f"ranks run another build than the agent's {card.version or 'unknown'}: {ranks}"
        checks.warning("ranks", message, remedy)


def check_silent_apis(silent: Sequence[ApiRecord], checks: Checks) -> None:
    """API processes that neither beat nor were stopped. The port of one tells whether a process is still there, as
    where it was stopped by a signal or its event loop hangs."""
    for record in silent:
        name = f"the API process {record.url} (pid {record.pid} on {record.host})"
        reason = _not_ready(record)
        if reason:
            remedy = (
                f"Mend the way from {record.host} to Redis (network, firewall, name, the URL of the process): it goes "
                "on by itself then. Let the load balancer ask /ready."
            )
            checks.error("api process", f"{name} runs, but does not reach Redis: {reason}", remedy)
        elif reason is not None:
            remedy = (
                f"On {record.host}: `kill -CONT {record.pid}` where `ps -o stat= -p {record.pid}` shows T; else end it "
                f"with `kill -9 {record.pid}` and start it again. Let the load balancer ask /health."
            )
            message = f"{name} does not beat, though its port accepts connections: it is stopped or hangs"
            checks.error("api process", message, remedy)
        else:
            remedy = "Start `furrow api` there, if nothing else did; this finding ends after an hour."
            checks.warning("api process", f"{name} does not beat and was not stopped: it has died or hangs", remedy)


def _not_ready(record: ApiRecord) -> str | None:
    """The reason that the process gives for not being ready; empty if its port takes a connection and nothing answers
    there, None if it takes none. An address of loopback is tried on its own host only."""
    place = urlsplit(record.url)
    host = place.hostname or ""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1" if record.host == os.uname().nodename else record.host
    elif is_loopback(host) and record.host != os.uname().nodename:
        return None
    try:
        with socket.create_connection((host, place.port or 80), timeout=ACCEPTS_WITHIN_S):
            pass
    except OSError:
        return None
    connection = HTTPConnection(host, place.port or 80, timeout=ANSWERS_WITHIN_S)
    try:
        connection.request("GET", "/ready")
        return msgspec.json.decode(connection.getresponse().read(LONGEST_ANSWER), type=_Ready).reason or ""
    except (OSError, HTTPException, msgspec.DecodeError):
        return ""
    finally:
        connection.close()


class _Ready(msgspec.Struct):
    """The part of the answer of /ready that is read here."""

    reason: str | None = None


def check_clocks(clocks: Mapping[str, int], checks: Checks) -> None:
    """`clocks`: by host, its clock minus that of Redis in ms."""
    wrong = {name: ms for name, ms in clocks.items() if abs(ms) > SKEW_MS}
    remedy = "Start a time service there (`timedatectl set-ntp true`, or chrony)."
    if not wrong:
        checks.ok("clock", f"within {max(map(abs, clocks.values()), default=0)} ms of Redis")
    elif len(wrong) > 1 and len(wrong) == len(clocks) and max(wrong.values()) - min(wrong.values()) <= SKEW_MS:
        seconds = -min(wrong.values(), key=abs) / 1000
        message = f"the clock of Redis' machine differs by {seconds:+.1f} s from those of all hosts"
        checks.warning("clock", message, remedy)
    else:
        differences = _first_few([f"{name} {ms / 1000:+.1f} s" for name, ms in wrong.items()])
        checks.warning("clock", f"clocks differ from that of Redis: {differences}", remedy)


def check_host(card: HostCard, facts: HostFacts | None) -> list[Finding]:
    """One host."""
    checks = Checks("hosts", card.id)
    if not card.alive:
        _check_away(card, checks)
        return checks.findings
    checks.ok("devices", ",".join(card.devices) or "cpu")
    if card.drained:
        checks.ok("drained", f"takes no replicas (`furrow drain {card.id} --undo` ends it)")
    if facts is None:
        remedy = "Wait 15 s after its start; else upgrade `furrow worker` there, or read its log (`host_facts`)."
        checks.warning("facts", "its agent publishes no facts: disk, clock, compiler and ports are not known", remedy)
        return checks.findings
    room = f"Free space on {card.id}"
    check_space("models", facts.models, (LITTLE, TOO_LITTLE), room, "HF_HOME", checks)
    room = f"Run `furrow cache clear weights` on {card.id}"
    check_space("cache", facts.cache, (LITTLE_CACHE, TOO_LITTLE_CACHE), room, "XDG_CACHE_HOME", checks)
    check_shared_memory(facts.shared_memory, checks)
    check_compiler(card, facts, checks)
    check_ports(card.id, facts, checks)
    check_ranks(card, facts, checks)
    return checks.findings


def _check_away(card: HostCard, checks: Checks) -> None:
    if not card.replicas:
        if card.drained:
            checks.ok("alive", "its agent is away, as it is drained; it has no replicas")
            return
        remedy = (
            "Start `furrow worker` there; where it runs, its log says why it does not reach Redis. "
            f"`furrow drain {card.id}` tells that it shall stay away."
        )
        checks.warning("alive", "its agent is away, and it has no replicas", remedy)
        return
    remedy = (
        "Start `furrow worker` there; where it runs, its log says why it does not reach Redis. If the host is lost, "
        "nothing is to be done: others take its replicas over."
    )
    message = f"its agent is away, so nothing replaces a rank that dies there: {_first_few(card.replicas)}"
    checks.warning("alive", message, remedy)


def check_space(
    check: str, space: Space | None, limits: tuple[int, int], room: str, variable: str, checks: Checks
) -> None:
    """`limits`: free bytes below which there is a warning, and an error; `room`: the remedy for these; `variable`: that
    of the environment which names another folder."""
    move = f"or start `furrow worker` with another folder in {variable}"
    if space is None:
        checks.error(check, "the file system does not answer", "Check its mount on the host.")
        return
    if space.unwritable:
        repair = "Make it a folder that the user of `furrow worker` can write, which the agent notes within 15 s"
        checks.error(check, f"{space.path} can't be written: {space.unwritable}", f"{repair}; {move}.")
        return
    level = "error" if space.free < limits[1] else "warning" if space.free < limits[0] else "ok"
    checks.judge(
        level, check, f"{in_words(space.free)} free of {in_words(space.total)} in {space.path}", f"{room}, {move}."
    )


def check_shared_memory(space: Space | None, checks: Checks) -> None:
    if space is None:
        remedy = "Mount one (`mount -t tmpfs tmpfs /dev/shm`); in Docker it is there by default."
        checks.warning("shared memory", "there is no /dev/shm: ranks on CPUs exchange over sockets", remedy)
        return
    level = "error" if space.free < SHARED_FREE else "warning" if space.total < SHARED_TOTAL else "ok"
    remedy = "Run `mount -o remount,size=1G /dev/shm`; a container takes `--shm-size 1g` (compose: `shm_size: 1g`)."
    checks.judge(level, "shared memory", f"{in_words(space.free)} free of {in_words(space.total)}", remedy)


def check_compiler(card: HostCard, facts: HostFacts, checks: Checks) -> None:
    """A CPU computes in C++ that the package brings or its host compiles; Triton compiles for a GPU with a compiler."""
    if facts.native:
        remedy = "Install a C++ compiler (`apt-get install g++`), then restart `furrow worker`."
        if "processor" in facts.native or "is 0" in facts.native:
            remedy = "Use another host, or unset FURROW_NATIVE."
        message = (
            f"nothing is computed in C++: {facts.native}. CPUs run the reference in torch: slower, with weights in "
            "float32, without --quant and GGUF files in blocks"
        )
        checks.warning("compiler", message, remedy)
    elif facts.compiler:
        checks.ok("compiler", facts.compiler)
    elif facts.brought and all(device == "cpu" for device in card.devices):
        checks.ok("compiler", f"none is needed: {facts.brought} came with the package")
    else:
        remedy = "Install one (`apt-get install g++`), or name one that works in CXX; then restart `furrow worker`."
        message = "there is no C++ compiler that runs: only kernels that were compiled before are used"
        checks.warning("compiler", message, remedy)
    if facts.kernels_off:
        device = card.devices[0] if card.devices else "cpu"
        remedy = (
            f"Run `furrow selftest --device {device}` on {card.id}: it tries them again, after an upgrade of driver "
            "or Furrow; unset FURROW_DISABLE where it names them."
        )
        checks.warning("kernels", f"switched off: {_first_few(facts.kernels_off)}", remedy)


def check_ports(host: str, facts: HostFacts, checks: Checks) -> None:
    """Ranks of one group on several hosts connect to free ports of each other."""
    failed = {peer: error for peer, error in facts.ports.items() if error}
    own = failed.pop(host, None)
    if own is not None:
        remedy = f"Start the worker of {host} with `furrow worker --address ADDRESS`, an address that it has."
        checks.error("ports", f"it can't listen on its own address {own}", remedy)
    for peer, error in failed.items():
        remedy = (
            f"Open the TCP ports above 1023 between {host} and {peer} in both directions. If {peer} tells a wrong "
            "address, start its worker with `furrow worker --address ADDRESS`."
        )
        checks.error("ports", f"ranks here can't reach those on {peer}: {error}", remedy)
    if facts.ports and own is None and not failed:
        checks.ok("ports", f"reaches {_first_few(sorted(facts.ports))}")


def _first_few(words: list[str], most: int = 5) -> str:
    """The first few, and how many more."""
    unique = list(Counter(words))
    more = f" and {len(unique) - most} more" if len(unique) > most else ""
    return ", ".join(unique[:most]) + more


def check_files(
    spec: ModelSpec, cards: Sequence[HostCard], facts: Mapping[str, HostFacts | None], checks: Checks, reasons: Set[str]
) -> None:
    """The model's files are there and the same on every host, as a replica may move to any. `reasons`: why
    replicas do not serve; they are not told again."""
    runs = {card.id for card in cards if any(replica.rpartition(":")[0] == spec.name for replica in card.replicas)}
    alive = [card.id for card in cards if card.alive]
    files_by_host = {
        host: one.files[spec.name] for host in alive if (one := facts.get(host)) and spec.name in one.files
    }
    for host, files in files_by_host.items():
        if files.error and not (host in runs and any(files.error in reason for reason in reasons)):
            remedy = f"Copy them to {host} as {spec.source}, or load the model by a path that every host has."
            uses = "it was given a replica" if host in runs else "no replica can move there"
            message = f"the files on {host} can't be used ({uses}): {files.error}"
            checks.judge("error" if host in runs else "warning", "files", message, remedy)
    prints = _by_fingerprint(files_by_host, {host: one.version for host, one in facts.items() if one is not None})
    if len(prints) == 1 and len(files_by_host) > 1:
        checks.ok("files", f"the same on {len(files_by_host)} hosts")
    if len(prints) > 1:
        hosts_of = "; ".join(f"{name}: {', '.join(sorted(hosts))}" for name, hosts in sorted(prints.items()))
        both = sum(bool(runs & hosts) for hosts in prints.values()) > 1
        remedy = f"Copy {spec.source} from one host to the others, then run `furrow models reload {spec.name}`."
        message = f"the files differ between hosts, and so do the answers ({hosts_of})"
        checks.judge("error" if both else "warning", "files", message, remedy)


def check_breaches(breaches: Sequence[Breach], checks: Checks) -> None:
    """Files that broke their bounds in an API process a short time ago."""
    for breach in breaches:
        if breach.file == CALLS:
            remedy = (
                "Name their form with `furrow api --tool-parser FORM` or `--response-template FILE`. Until then "
                "demanded calls are plain JSON, and others are text."
            )
            checks.warning("calls", "calls of this model are not understood", remedy)
            continue
        at = time.strftime("%H:%M:%S", time.gmtime(breach.at))
        remedy = (
            f"Requests that the {breach.file} can't serve get 422. Load the model from files that you trust, or with "
            f"another {breach.file}."
        )
        checks.warning("breaches", f"its {breach.file} {breach.deed}, last at {at} UTC", remedy)


def _by_fingerprint(files_by_host: Mapping[str, FilesHere], versions: Mapping[str, str]) -> dict[str, set[str]]:
    """Hosts by fingerprint. Only hosts of one version of Furrow are compared: the newest has its own way to compute."""
    newest = max((versions[host] for host in files_by_host), key=_order, default="")
    prints: dict[str, set[str]] = {}
    for host, files in files_by_host.items():
        if files.fingerprint and versions[host] == newest:
            prints.setdefault(files.fingerprint, set()).add(host)
    return prints


def _order(version: str) -> tuple[list[int], str]:
    """The place of a version among others: its numbers, then, among builds of one release, its text."""
    release = version.partition("+")[0]
    return [int(digits) for digits in re.findall(r"\d+", release)], version
