"""The prefix cache: an index over the tokens whose KV the ranks hold, and the ended sequences that are kept.

The index is a hash chain: the hash of a block covers its tokens and the block before it. A hash only finds candidates;
salts, tokens, and the digests of images, are compared.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from worker.scheduling.prefixes.snapshots import Snapshots
from worker.scheduling.sequence import Sequence, SequenceState

BLOCK_TOKENS = 64
"""The shortest prefix that is looked for: copying it costs a step more than computing a few tokens would."""


@dataclass(frozen=True, slots=True)
class Start:
    """How a sequence can begin: with the first `count` positions of the donor's KV, or with nothing (0)."""

    donor: int = 0
    count: int = 0
    awaited: bool = False
    """True if a sequence that is still in its prefill will soon have clearly more."""
    alike: int = 0
    """Positions in whole blocks that some sequence has in common with it, which may be more."""


class PrefixCache:
    """Knows running sequences (`follow`) and keeps ended ones (`keep`), the one that was used longest ago first."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS, snapshots: Snapshots | None = None) -> None:
        """`snapshots`: a sequence can begin only where there is a state, None for a model without recurrent layers."""
        self._block, self._snapshots = block_tokens, snapshots
        self._sequences: dict[int, Sequence] = {}
        self._holders: dict[int, dict[int, None]] = {}
        """Hash of a block → the sids that have it, in order of their coming."""
        self._indexed: dict[int, int] = {}
        """Sid → how many of its blocks are in the index."""
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def kept(self) -> list[int]:
        """Sids of the ended sequences, the next to go first."""
        return list(self._kept)

    @property
    def known(self) -> set[int]:
        return set(self._sequences)

    def is_kept(self, sid: int) -> bool:
        return sid in self._kept

    def follow(self, sequence: Sequence) -> None:
        """Index what a sequence has grown by; its KV may lag behind."""
        sid = sequence.sid
        self._sequences[sid] = sequence
        blocks = self._blocks(sequence)
        for block in blocks[self._indexed.get(sid, 0) :]:
            self._holders.setdefault(block, {})[sid] = None
        self._indexed[sid] = len(blocks)

    def keep(self, sequence: Sequence) -> bool:
        """Keep a sequence that is about to end; False for one that has too little of use to anybody."""
        certain = self._certain(sequence)
        if self._snapshots is not None:
            certain = self._snapshots.place(sequence, certain)
        if sequence.sid not in self._sequences or certain < self._block:
            return False
        self._kept[sequence.sid] = None
        return True

    def forget(self, sid: int) -> None:
        """Nothing begins with it any more; an unknown one is no error."""
        sequence = self._sequences.pop(sid, None)
        if sequence is None:
            return
        for block in sequence.blocks[: self._indexed.pop(sid)]:
            holders = self._holders.get(block, {})
            holders.pop(sid, None)
            if not holders:
                self._holders.pop(block, None)
        self._kept.pop(sid, None)

    def find(self, sequence: Sequence) -> Start:
        """The longest beginning that some sequence's KV has; at least one token is left to be computed, and all whose
        logits are wanted."""
        best, promised, alike = Start(), 0, 0
        compared: set[int] = set()
        if sequence.reusable < self._block:
            return best
        blocks = self._blocks(sequence)
        for depth in range(len(blocks), 0, -1):
            if best.count >= depth * self._block:  # shallower ones have less
                break
            for sid in self._holders.get(blocks[depth - 1], ()):
                if sid in compared:
                    continue
                donor = self._sequences[sid]
                if donor.salt != sequence.salt:
                    continue
                alike = max(alike, depth * self._block)
                compared.add(sid)  # at fewer blocks it has the same beginning in common
                if not self._certain(donor):
                    promised = max(promised, self._promised(donor, depth * self._block))
                elif (count := self._common(donor, sequence, (depth + 1) * self._block)) > best.count:
                    best = Start(sid, count)
                    if count >= depth * self._block:
                        break
        if best.count < self._block:
            best = Start()
        awaited = min(promised, sequence.reusable) >= best.count + self._block
        return Start(best.donor, best.count, awaited, alike)

    def use(self, start: Start) -> bool:
        """Note that a kept donor is used; False where so little of it is left over that it need not be kept beside."""
        if start.donor in self._kept:
            self._kept.move_to_end(start.donor)
            return self._sequences[start.donor].cached - start.count >= self._block
        return True

    def sequence(self, sid: int) -> Sequence:
        """A sequence that is known. Raises KeyError for another sid."""
        return self._sequences[sid]

    def _promised(self, donor: Sequence, most: int) -> int:
        return most if self._snapshots is None else self._snapshots.promised(donor, most)

    def _certain(self, sequence: Sequence) -> int:
        """Positions whose KV the ranks hold, proved by a token that was sampled from them: a prefill may yet fail."""
        if sequence.state is SequenceState.DECODE or sequence.sid in self._kept:
            return sequence.cached
        return 0

    def _common(self, donor: Sequence, sequence: Sequence, most: int) -> int:
        """The length of the common prefix, as far as the donor is certain and the sequence can use it."""
        stop = min(most, self._certain(donor), sequence.reusable)
        ours, theirs = sequence.identity(0, stop), donor.identity(0, stop)
        if ours != theirs:
            stop = next(index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        return stop if self._snapshots is None else self._snapshots.place(donor, stop)

    def _blocks(self, sequence: Sequence) -> list[int]:
        """The hashes of the sequence's whole blocks; a context only grows, so they are made once."""
        blocks, size = sequence.blocks, self._block
        while (len(blocks) + 1) * size <= sequence.length:
            start = len(blocks) * size
            before = blocks[-1] if blocks else sequence.salt
            blocks.append(hash((before, *sequence.identity(start, start + size))))
        return blocks

    def check_integrity(self, running: set[int]) -> list[str]:
        """The contradictions in the index, given the sids that run."""
        counted = dict.fromkeys(self._sequences, 0)
        for holders in self._holders.values():
            for sid in holders:
                counted[sid] = counted.get(sid, 0) + 1
        faults = {
            "a kept prefix is of a sequence that runs": bool(running & self._kept.keys()),
            "a prefix is indexed that nobody holds": self._sequences.keys() != running | self._kept.keys(),
            "a prefix is filed under another sid": any(sid != s.sid for sid, s in self._sequences.items()),
            "the index of prefixes does not add up": counted
            != {sid: len(set(self._sequences[sid].blocks[:count])) for sid, count in self._indexed.items()},
        }
        return [fault for fault, present in faults.items() if present]
