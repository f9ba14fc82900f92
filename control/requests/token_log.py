"""A token log in memory, kept small: an API process holds one for each stream, a leader one for each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import msgspec

from control.messages import LogEntry

_BLOCK = 64
"""Entries that are packed together. As objects they take some 140 bytes each, packed about 10."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[LogEntry]).decode


def _short(entry: LogEntry) -> LogEntry | tuple[int, int, int | None]:
    """An entry without what most have not; decoded it is the same."""
    plain = entry.finish is entry.cause is entry.logprobs is entry.cached is entry.prompt is entry.vector is None
    plain = plain and entry.fingerprint is entry.predicted is None
    return (entry.seq, entry.choice, entry.token) if plain else entry


class TokenLog(Sequence[LogEntry]):
    """A list of entries that only grows. Its end is at hand; what lies further back is unpacked when asked for."""

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
