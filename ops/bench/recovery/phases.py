"""Where the time of a recovery goes: from the strike to the next token, split at what Redis remembers of it."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from statistics import median

from control.keys import ReplicaKeys
from control.redis.clients import SyncRedis
from control.redis.connection import read, run
from control.replicas import health
from control.replicas.health import Formation

TARGETS_MS = {
    "detect": 100,
    "fence": 150,
    "respawn": 300,
    "rendezvous": 200,
    "load": 500,
    "prefill": 250,
}
"""The limit of each phase after a SIGKILL of the demonstration model's rank, with a standby process: 1.5 s in all."""


@dataclass(frozen=True, slots=True)
class Phases:
    """Milliseconds of each phase, in order.

    detect: until the epoch was poisoned. fence: until a leader held the lock of the next. respawn: until every rank
    answered in it. rendezvous: until the group had proved itself with a sum. load: until every rank had its shard.
    prefill: until the first new token was in the log.
    """

    detect: int
    fence: int
    respawn: int
    rendezvous: int
    load: int
    prefill: int


def split(struck_ms: int, poisoned_ms: int, formation: Formation, token_ms: int) -> Phases:
    """All times in ms since 1970. Where the epoch was not poisoned before it was left, nothing was to detect."""
    poisoned_ms = min(max(poisoned_ms, struck_ms), formation.led)
    marks = [struck_ms, poisoned_ms, formation.led, formation.gathered, formation.joined, formation.loaded, token_ms]
    return Phases(*(after - before for before, after in pairwise(marks)))


def observe(client: SyncRedis, model: str, replica: str, epoch: int, struck_ms: int, token_ms: int) -> Phases:
    """The phases from the end of `epoch` to the first token of the next one that was formed; call it when it is there.

    Epochs that were led in between and failed count as part of the fence.
    """
    later = [
        one for one in run(client, health.formations(model, replica)) if one.epoch > epoch and one.loaded <= token_ms
    ]
    if not later:
        raise LookupError(f"no formation after epoch {epoch} of {model}:{replica} is known")
    return split(struck_ms, poisoned_at(client, model, replica, epoch), later[0], token_ms)


def poisoned_at(client: SyncRedis, model: str, replica: str, epoch: int) -> int:
    """Server ms at which `epoch` was poisoned; 0 if it never was."""

    def parse(reply: list[tuple[str, dict[str, str]]]) -> int:
        return next((int(entry.partition("-")[0]) for entry, poison in reply if int(poison["epoch"]) == epoch), 0)

    return run(client, read("XREVRANGE", ReplicaKeys(model, replica).poisons, "+", "-", "COUNT", 64, parse=parse))


def table(found: dict[str, list[Phases]], targets: dict[str, int] | None) -> str:
    """Medians of each phase per fault, in ms, with the targets below them."""
    names = [field.name for field in fields(Phases)]
    lines = [f"{'phase, median ms':<18}" + "".join(f"{name:>12}" for name in [*names, "in all"])]
    for fault, mine in found.items():
        medians = [round(median(column)) for column in zip(*(astuple(one) for one in mine), strict=True)]
        lines.append(f"{fault:<18}" + "".join(f"{value:>12}" for value in [*medians, sum(medians)]))
    if targets is not None:
        values = [targets[name] for name in names]
        lines.append(f"{'target, killed':<18}" + "".join(f"{value:>12}" for value in [*values, sum(values)]))
    return "\n".join(lines)
