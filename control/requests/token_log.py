"""The token log of a request: the entries in memory, their emission by a leader, a staged log, and reading in pages.

An API process has a log in memory for each stream, a leader for each request, so it is kept small there. `emit` brings
the entries of a step to Redis and to the followers in one script. A staged log is written beside the one in use, a page
at a time; a short script then puts it in its place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import msgspec

from control.errors import RedisUnavailable, RequestError
from control.keys import ModelKeys
from control.messages import GenerationRequest, LogEntry, RequestState, decode_request, encode
from control.redis.clients import AsyncRedis, SyncRedis
from control.redis.connection import Call, Steps, arun, read, run
from control.replicas.lease import Lease, granted

_BLOCK = 64
"""Entries that are packed together. As objects they take some 140 bytes each, packed about 10."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[LogEntry]).decode


def _is_plain(entry: LogEntry) -> bool:
    """True if it has its place and its token alone, as most have."""
    plain = entry.finish is entry.cause is entry.logprobs is entry.cached is entry.prompt is entry.vector is None
    return plain and entry.fingerprint is entry.predicted is None


def _short(entry: LogEntry) -> LogEntry | tuple[int, int, int | None]:
    """An entry without what most have not; decoded it is the same."""
    return (entry.seq, entry.choice, entry.token) if _is_plain(entry) else entry


class TokenLog(Sequence[LogEntry]):
    """A list of entries that only grows. Its end is kept as entries; earlier ones are packed, and unpacked when they
    are read."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._tail: list[LogEntry] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, entry: LogEntry) -> None:
        self._tail.append(entry)
        self._length += 1
        if len(self._tail) == 2 * _BLOCK:
            self._blocks.append(_encode([_short(entry) for entry in self._tail[:_BLOCK]]))
            del self._tail[:_BLOCK]

    def extend(self, entries: Sequence[LogEntry]) -> None:
        self._tail.extend(entries)
        self._length += len(entries)
        packed = _BLOCK * (len(self._tail) // _BLOCK - 1)
        if packed > 0:
            blocks = [self._tail[at : at + _BLOCK] for at in range(0, packed, _BLOCK)]
            self._blocks += [_encode([_short(entry) for entry in block]) for block in blocks]
            del self._tail[:packed]

    def since(self, index: int) -> list[LogEntry]:
        """The entries after the first `index`. Near the end, where readers are, the cost doesn't grow with the log."""
        packed = _BLOCK * len(self._blocks)
        return self._tail[index - packed :] if index >= packed else self[index:]

    @overload
    def __getitem__(self, index: int) -> LogEntry: ...
    @overload
    def __getitem__(self, index: slice) -> list[LogEntry]: ...
    def __getitem__(self, index: int | slice) -> LogEntry | list[LogEntry]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return self._between(places, places + 1)[0]
        return self._between(places.start, places.stop)[:: places.step]

    def _between(self, start: int, stop: int) -> list[LogEntry]:
        if start >= stop:
            return []
        first = min(start // _BLOCK, len(self._blocks))
        behind = -(-stop // _BLOCK)
        entries = [entry for block in self._blocks[first:behind] for entry in _decode(block)]
        if behind > len(self._blocks):
            entries += self._tail
        return entries[start - first * _BLOCK : stop - first * _BLOCK]


CALL_COST = 400
"""Upper bound of one call, in the cost of an entry: about two milliseconds of the server's time."""
_ROW_COST = 4
_END_COST = 40
_VECTOR_BYTES = 512
"""Bytes of vectors that cost as much as an entry."""


class Emission(msgspec.Struct, frozen=True):
    """The entries of one request in a step. Without entries the call only reads whether the request was cancelled, has
    expired or was taken."""

    rid: str
    seq: int
    """The seq of the first entry, or the next expected one."""
    entries: list[LogEntry] = []
    done: RequestState | None = None
    """The way in which the request ends with this step; None while it continues."""
    times: dict[str, int] = {}
    """More fields for its hash, such as t_prefill in ms."""


@dataclass(frozen=True, slots=True)
class EmitResult:
    """`behind` maps the requests whose row was refused to the seq that the log expects next.

    A row that arrives again because its answer was lost is no mismatch: it changes nothing and is not `behind`.
    `cancelled` and `expired` go on until an Emission ends them. `taken` are not this leader's any more: drop them.
    `waiting` counts the model's requests that no leader has.
    """

    accepted_ms: int
    behind: dict[str, int]
    cancelled: list[str]
    expired: list[str]
    taken: list[str]
    waiting: int


def encode_entry(entry: LogEntry) -> str:
    """An entry as JSON without its absent tail: most are `[seq,choice,token]`, and there is one per token."""
    if entry.token is not None and _is_plain(entry):
        return f"[{entry.seq},{entry.choice},{entry.token}]"
    text = encode(entry).decode()
    for _ in LogEntry.__struct_defaults__:
        text = text.removesuffix(",null]") + "]" if text.endswith(",null]") else text
    return text


def emit(lease: Lease, rows: list[Emission]) -> Call[EmitResult]:
    """Append and publish the rows whose owner and seq are right. Raises Lost, Fenced or Poisoned: then nothing was.

    Sets t_first with a log's first entry. A request that is done leaves the queue, loses its prompt and lives on for
    its retention.
    """
    keys = lease.keys
    args = (lease.token, lease.model_keys.base, encode([_row(row) for row in rows]))
    return Call("emit", (keys.lock, keys.epoch, keys.poison), args, _result)


def emit_all(lease: Lease, rows: Sequence[Emission]) -> list[Call[EmitResult]]:
    """As `emit`, in as many calls as keep each of them short. `merged` makes one result of theirs.

    Where a call raises, those before it were taken.
    """
    return [emit(lease, part) for part in _parts(rows)]


def merged(results: Sequence[EmitResult]) -> EmitResult:
    """The results of all calls of one `emit_all`."""
    last = results[-1]
    return EmitResult(
        last.accepted_ms,
        {rid: expected for result in results for rid, expected in result.behind.items()},
        [rid for result in results for rid in result.cancelled],
        [rid for result in results for rid in result.expired],
        [rid for result in results for rid in result.taken],
        last.waiting,
    )


def _parts(rows: Sequence[Emission]) -> Iterator[list[Emission]]:
    """At least one, and without rows one that is empty: it still asks for the lease."""
    part = list[Emission]()
    cost = 0
    for row in rows:
        own = len(row.entries) + (_ROW_COST if row.done is None else _END_COST)
        own += sum(len(entry.vector) for entry in row.entries if entry.vector is not None) // _VECTOR_BYTES
        if part and cost + own > CALL_COST:
            yield part
            part = []
            cost = 0
        part.append(row)
        cost += own
    yield part


def _row(row: Emission) -> tuple[Any, ...]:
    """As the script reads it. The values of `times` are text, because Lua's numbers would lose digits on the way."""
    texts = [encode_entry(entry) for entry in row.entries]
    tokens = sum([entry.token is not None for entry in row.entries])
    stamps = [text for name, value in row.times.items() for text in (name, str(value))] if row.times else []
    ends = [entry.choice for entry in row.entries if entry.finish is not None]
    head = (row.rid, row.seq, row.done or "", tokens, texts)
    return (*head, stamps, ends) if stamps or ends else head


def _result(reply: list[Any]) -> EmitResult:
    now, behind, cancelled, expired, taken, waiting = granted(reply)
    expected = dict(zip(behind[::2], map(int, behind[1::2]), strict=True))
    return EmitResult(int(now), expected, cancelled, expired, taken, waiting)


def stage(key: str, entries: Sequence[LogEntry], count: int) -> Steps[tuple[int, str]]:
    """Write the first `count` of `entries`, which count from seq 1, to the staged log `key`.

    Returns how many have no token, and the choices that have ended in them. Raises RedisUnavailable where the staged
    log lapsed meanwhile.
    """
    without = 0
    ended = list[str]()
    for at in range(0, count, WRITE_ENTRIES):
        page = entries[at : min(count, at + WRITE_ENTRIES)]
        if [entry.seq for entry in page] != list(range(at + 1, at + 1 + len(page))):
            raise RequestError(f"the entries for {key} don't count from 1 without a gap")
        last: int = yield Call("stage", (key,), (at + 1, *(encode_entry(entry) for entry in page)), int)
        if last < at + len(page):
            raise RedisUnavailable(f"The staged token log {key} lapsed while it was written; try again")
        without += tokenless(page)
        ended += ended_in(page).split()
    return without, " ".join(ended)


def tokenless(entries: Sequence[LogEntry]) -> int:
    return sum(entry.token is None for entry in entries)


def ended_in(entries: Sequence[LogEntry]) -> str:
    """The choices that end in these entries, separated by spaces, as the request's hash has them."""
    return " ".join(str(entry.choice) for entry in entries if entry.finish is not None)


PAGE_ENTRIES = 1_000
"""Entries of a log that are read in one call: about a third of a millisecond of the server's time."""

FOLLOW_ENTRIES = 500
"""Entries that `follow` reads inside its script, where each costs three times as much."""

WRITE_ENTRIES = 125
"""Entries that one call writes; each costs several times as much as one that is read."""

decode_entries = msgspec.json.Decoder(list[LogEntry]).decode


def read_params(model: str, rid: str) -> Call[GenerationRequest | None]:
    """The request's parameters; None where the request has ended or is gone."""

    def parse(reply: str | None) -> GenerationRequest | None:
        return None if reply is None else decode_request(reply)

    return read("HGET", ModelKeys(model).request(rid), "params", parse=parse)


def read_log(model: str, rid: str, have: int, most: int = PAGE_ENTRIES) -> Call[list[LogEntry]]:
    """At most `most` entries after seq `have`; empty too when the request is gone (follow tells)."""

    def parse(reply: list[tuple[str, dict[str, str]]] | None) -> list[LogEntry]:
        return decode_entries(f"[{','.join([fields['e'] for _, fields in reply or []])}]")

    return read("XRANGE", ModelKeys(model).log(rid), f"{have + 1}-0", "+", "COUNT", most, parse=parse)


def read_pages(client: SyncRedis, model: str, rid: str, have: int = 0) -> Iterator[list[LogEntry]]:
    """The log after seq `have`, page by page. Raises RedisUnavailable."""
    while page := run(client, read_log(model, rid, have)):
        yield page
        have = page[-1].seq


async def aread_pages(client: AsyncRedis, model: str, rid: str, have: int = 0) -> AsyncIterator[list[LogEntry]]:
    """As `read_pages`, on an asyncio client: the event loop is left to others between two pages."""
    while page := await arun(client, read_log(model, rid, have)):
        yield page
        have = page[-1].seq
