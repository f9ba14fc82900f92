"""Checks of a model's files: the same on every host."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set

from control.messages import ModelSpec
from control.operations.checks.findings import Checks
from control.placement.farm import HostCard
from control.placement.host_facts import FilesHere, HostFacts
from control.records.breaches import CALLS, Breach


def check_files(
    spec: ModelSpec, cards: Sequence[HostCard], facts: Mapping[str, HostFacts | None], checks: Checks, reasons: Set[str]
) -> None:
    """The model's files are there and the same on every host, as a replica may move to any. `reasons`: why
    replicas do not serve; they are not told again."""
    runs = {card.id for card in cards if any(one.rpartition(":")[0] == spec.name for one in card.replicas)}
    alive = [card.id for card in cards if card.alive]
    here = {host: one.files[spec.name] for host in alive if (one := facts.get(host)) and spec.name in one.files}
    for host, files in here.items():
        if files.error and not (host in runs and any(files.error in reason for reason in reasons)):
            remedy = f"Copy them to {host} as {spec.source}, or load the model by a path that every host has."
            uses = "it was given a replica" if host in runs else "no replica can move there"
            message = f"the files on {host} can't be used ({uses}): {files.error}"
            checks.judge("error" if host in runs else "warning", "files", message, remedy)
    prints = _by_fingerprint(here, {host: one.version for host, one in facts.items() if one is not None})
    if len(prints) == 1 and len(here) > 1:
        checks.ok("files", f"the same on {len(here)} hosts")
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


def _by_fingerprint(here: Mapping[str, FilesHere], versions: Mapping[str, str]) -> dict[str, set[str]]:
    """Hosts by fingerprint. Only hosts of one version of Furrow are compared: the newest has its own way to compute."""
    newest = max((versions[host] for host in here), default="")
    prints: dict[str, set[str]] = {}
    for host, files in here.items():
        if files.fingerprint and versions[host] == newest:
            prints.setdefault(files.fingerprint, set()).add(host)
    return prints
