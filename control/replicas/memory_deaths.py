"""Deaths of ranks for lack of memory: which replica of a host is given up, so that the others serve on.

Two models that do not fit into a host's memory kill each other for ever: the kernel chooses any of their ranks, and
each model serves for a moment between two deaths. So the deaths of all ranks of a host count, whatever happened between
them, since the last load; at the third within ten minutes the replica that came last goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from control import keys
from control.constants import MEMORY_DEATHS_LENGTH, MEMORY_DEATHS_MS
from control.redis.clients import SyncRedis
from control.redis.connection import Call, Entry, optional_text, read, run, run_every, write
from control.sizes import in_words

DEATHS = 3
"""So many within MEMORY_DEATHS_MS are too many."""
TOGETHER_MS = 2_000
"""Ranks of one replica that die within this time count once: a replica that ends takes all of them along."""

CAUSE = "lack of memory"
"""In the cause of every replica that has ended, or was given up, for it."""


class MemoryDeath(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a rank by the kernel for lack of memory. `at_ms` is by the server's clock."""

    at_ms: int
    pid: int
    model: str
    replica: str
    rank: int


class Occupant(msgspec.Struct, frozen=True, kw_only=True):
    """A replica in the memory of a host. `loaded_ms`: when the host first got this revision of it, by the server's
    clock; `used_bytes`: the most that each of its ranks on the host was seen to use, together."""

    model: str
    replica: str
    loaded_ms: int
    ranks: int
    used_bytes: int

    @property
    def place(self) -> tuple[str, str]:
        return self.model, self.replica

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.model} ({self.replica}, {ranks}) up to {in_words(self.used_bytes)}"


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. `limit` is that of the control group in which the ranks run, 0 without one."""

    limit: int
    total: int

    def __str__(self) -> str:
        limit = f"the control group's limit is {in_words(self.limit)}, " if 0 < self.limit < self.total else ""
        return f"{limit}the host has {in_words(self.total)}"


def to_give_up(deaths: Sequence[MemoryDeath], occupants: Sequence[Occupant], now_ms: int) -> Occupant | None:
    """The occupant that came last, if there were DEATHS in the last MEMORY_DEATHS_MS since it came; else None. `deaths`
    are in the order of their times."""
    if not occupants:
        return None
    youngest = max(occupants, key=lambda one: (one.loaded_ms, one.place))
    since = max(now_ms - MEMORY_DEATHS_MS, youngest.loaded_ms)
    counted: list[MemoryDeath] = []
    last: dict[tuple[str, str], int] = {}
    for death in deaths:
        place = death.model, death.replica
        if death.at_ms > since and death.at_ms - last.get(place, -TOGETHER_MS) >= TOGETHER_MS:
            last[place] = death.at_ms
            counted.append(death)
    return youngest if len(counted) >= DEATHS else None


def why(host: str, youngest: Occupant, other_replicas: Sequence[Occupant], memory: HostMemory) -> str:
    """The cause with which `youngest` is given up: figures and remedy."""
    beside = "; beside it " + ", ".join(map(str, other_replicas)) if other_replicas else ""
    came = ", which was loaded last" if other_replicas else ""
    return (
        f"{CAUSE} on host {host}: ranks there were killed {DEATHS} times in {MEMORY_DEATHS_MS // 60_000} minutes. "
        f"{youngest}{came}{beside}; {memory}. Load it with --quant int8 or fewer --kv-tokens, unload another model of "
        "that host, or give the host or container more memory"
    )


def note_death(host: str, pid: int, model: str, replica: str, rank: int) -> list[Call[int]]:
    """The calls that store a death, which outlives agent and supervisor; twice counts once."""
    stream = keys.memory_deaths(host)
    words = ("pid", pid, "model", model, "replica", replica, "rank", rank)
    return [
        write("XADD", stream, "MAXLEN", "~", MEMORY_DEATHS_LENGTH, "*", *words, parse=lambda _: 0),
        write("PEXPIRE", stream, MEMORY_DEATHS_MS, parse=int),
    ]


def deaths_of(host: str) -> Call[list[MemoryDeath]]:
    """The deaths on a host that may still count, oldest first."""

    def parse(reply: list[Entry]) -> list[MemoryDeath]:
        deaths: dict[int, MemoryDeath] = {}
        for entry, fields in reply:
            death = MemoryDeath(
                at_ms=int(entry.partition("-")[0]),
                pid=int(fields["pid"]),
                model=fields["model"],
                replica=fields["replica"],
                rank=int(fields["rank"]),
            )
            deaths.setdefault(death.pid, death)  # told twice, it keeps its first time
        return list(deaths.values())

    return read("XRANGE", keys.memory_deaths(host), "-", "+", parse=parse)


def forget_deaths(client: SyncRedis, host: str) -> None:
    """Count anew: a replica was given up for them."""
    run(client, read("DEL", keys.memory_deaths(host), parse=int))


def server_ms() -> Call[int]:
    """The server's clock, by which deaths and loads are recorded."""
    return read("TIME", parse=lambda reply: int(reply[0]) * 1000 + int(reply[1]) // 1000)


def note_load(client: SyncRedis, host: str, model: str, replica: str, revision: int) -> int:
    """The time at which the host first got this revision of a replica; now, if it has just got it."""
    key = keys.host_loads(host)
    field = f"{model} {replica}"
    record, now = run_every(client, [read("HGET", key, field, parse=optional_text), server_ms()])
    words = (record or "").split()
    if len(words) == 2 and int(words[0]) == revision:
        return int(words[1])
    run(client, write("HSET", key, field, f"{revision} {now}", parse=int))
    return now


def forget_load(client: SyncRedis, host: str, model: str, replica: str) -> None:
    """The host does not have the replica any more."""
    run(client, read("HDEL", keys.host_loads(host), f"{model} {replica}", parse=int))
