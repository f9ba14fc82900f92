"""The exchanges in Python and torch, for hosts without a compiler: some twenty times slower, still faster than gloo.

Slots and rounds are as in exchange.cpp. There are no memory barriers: the processor must keep the order of its stores
and of its loads, as x86 does.
"""

from __future__ import annotations

import platform
import time

import torch
from torch import Tensor

from worker.collective import exchange
from worker.collective.abort import Abort
from worker.collective.peers import Peers
from worker.collective.segment import SEAT_BYTES, SLOT_BYTES, Segment, slot_offset
from worker.detectors import COLLECTIVE_S

SPINS = 200
YIELD_S = 0.001
LOOK_S = 0.001
LONGEST_SLEEP_S = 0.005
WRAP = 2**32
REDUCE, GATHER, BROADCAST = 1, 3, 4


def ordered() -> bool:
    """True if this processor keeps the order that is needed."""
    return platform.machine().lower() in ("x86_64", "amd64")


class InterpretedExchange:
    """See Exchange."""

    def __init__(self, segment: Segment, peers: Peers, abort: Abort, deadline_s: float = COLLECTIVE_S) -> None:
        self._rank, self._world = segment.rank, segment.world_size
        self._segment, self._peers, self._abort, self._deadline_s = segment, peers, abort, deadline_s
        self._words = memoryview(segment.memory).cast("I")
        self._tags = memoryview(segment.memory).cast("Q")
        self._bytes = torch.frombuffer(segment.memory, dtype=torch.uint8)
        self._times = memoryview(segment.memory).cast("q")
        self._round = 0
        self._waited_ns = self._waiting_since = 0

    # --- exchanges --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> None:
        flat = tensor.view(-1)
        for part in flat.split(SLOT_BYTES // tensor.element_size()):
            self._begin()
            self._slot(self._rank, part.nbytes).view(part.dtype).copy_(part)
            self._meet_all(REDUCE, part.nbytes)
            slots = [self._slot(rank, part.nbytes).view(part.dtype) for rank in range(self._world)]
            torch.add(slots[0], slots[1], out=part)
            for slot in slots[2:]:
                part.add_(slot)

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        if not tensor.numel():
            return
        width = tensor.shape[-1] * tensor.element_size()
        rows = tensor.view(-1, tensor.shape[-1]).view(torch.uint8)
        sides = out.view(-1, out.shape[-1]).view(torch.uint8).view(-1, self._world, width)
        # Pieces of whole rows where a row fits, and of rows where not: a piece is a rectangle either way.
        for top in range(0, len(rows), max(1, SLOT_BYTES // width)):
            bottom = min(len(rows), top + max(1, SLOT_BYTES // width))
            for begin in range(0, width, SLOT_BYTES):
                piece = rows[top:bottom, begin : begin + SLOT_BYTES]
                self._begin()
                self._slot(self._rank, piece.numel()).copy_(piece.reshape(-1))
                self._meet_all(GATHER, piece.numel())
                for rank in range(self._world):
                    slot = self._slot(rank, piece.numel()).view(piece.shape)
                    sides[top:bottom, rank, begin : begin + SLOT_BYTES].copy_(slot)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if not tensor.numel():
            return
        for part in tensor.view(-1).view(torch.uint8).split(SLOT_BYTES):
            self._begin()
            if self._rank == source:
                self._slot(source, part.nbytes).copy_(part)
            self._publish(tag := self._tag(BROADCAST + source, part.nbytes))
            self._meet(source, tag)
            if self._rank != source:
                part.copy_(self._slot(source, part.nbytes))

    def waited_s(self) -> float:
        return exchange.waited_s(self._waited_ns, self._waiting_since)

    def leave(self) -> None:
        self._words[self._rank * SEAT_BYTES // 4 + 2] = 1
        self._peers.close()

    # --- rounds -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The next round, once nobody reads this rank's slot of it any more."""
        before, self._round = self._round, (self._round + 1) % WRAP
        for rank in range(self._world):
            self._await(rank, before)

    def _slot(self, rank: int, count: int) -> Tensor:
        """The first `count` bytes of the rank's slot in this round."""
        return self._bytes[(start := slot_offset(rank, self._round)) : start + count]

    def _tag(self, kind: int, count: int) -> int:
        return kind << 48 | count

    def _publish(self, tag: int) -> None:
        self._tags[self._rank * SEAT_BYTES // 8 + 2 + self._round % 2] = tag
        self._times[self._rank * SEAT_BYTES // 8 + 4 + self._round % 2] = time.monotonic_ns()
        self._words[self._rank * SEAT_BYTES // 4] = self._round

    def _meet(self, rank: int, tag: int) -> None:
        self._await(rank, self._round)
        if self._tags[rank * SEAT_BYTES // 8 + 2 + self._round % 2] != tag:
            raise exchange.astray(rank)

    def _meet_all(self, kind: int, count: int) -> None:
        self._publish(tag := self._tag(kind, count))
        for rank in range(self._world):
            self._meet(rank, tag)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _reached(self, rank: int, round_number: int) -> bool:
        return (self._words[rank * SEAT_BYTES // 4] - round_number) % WRAP < WRAP // 2

    def _await(self, rank: int, round_number: int) -> None:
        """Until the rank has published the round; see `await` of exchange.cpp for the time that counts."""
        if self._reached(rank, round_number):
            return
        self._waiting_since = begun = time.monotonic_ns()
        try:
            self._wait(rank, round_number)
        finally:
            self._waiting_since = 0
        self._waited_ns += max(0, self._times[rank * SEAT_BYTES // 8 + 4 + round_number % 2] - begun)

    def _wait(self, rank: int, round_number: int) -> None:
        """Spin, let other threads run, sleep."""
        for _ in range(SPINS):
            if self._reached(rank, round_number):
                return
        begun = looked = time.monotonic()
        while not self._reached(rank, round_number):
            now = time.monotonic()
            if self._abort.said:
                raise exchange.aborted(self._abort)
            if self._words[rank * SEAT_BYTES // 4 + 2] and not self._reached(rank, round_number):
                raise exchange.left(rank)
            if now - looked >= LOOK_S:
                looked = now
                self._look(rank, round_number, now - begun)
            waited = now - begun
            time.sleep(0.0 if waited < YIELD_S else min(max(waited / 16, 0.0002), LONGEST_SLEEP_S))

    def _look(self, awaited: int, round_number: int, waited_s: float) -> None:
        """Raise CollectiveFailed where somebody will never come."""
        for rank in self._peers.ended():
            if not self._reached(rank, round_number):
                raise exchange.dead(self._peers, rank)
        if waited_s > self._deadline_s:
            raise exchange.late(awaited, self._deadline_s)
