"""Which blocks are whose: a free list, and a count for blocks that several sequences hold. Numbers only."""

from __future__ import annotations


class Blocks:
    """`count` blocks, numbered from 0, handed out by holder."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._held: dict[int, list[int]] = {}
        self._holders: dict[int, int] = {}
        """The number of holders of each block that has more than one."""

    @property
    def free(self) -> int:
        return len(self._free)

    def of(self, holder: int) -> list[int]:
        return self._held.get(holder, [])

    def grow(self, holder: int, length: int) -> list[tuple[int, int]]:
        """Let `holder` have `length` blocks; what was added, as (index, block). Raises ValueError if too few are free,
        with nothing changed."""
        held = self._held.setdefault(holder, [])
        missing = length - len(held)
        if missing > len(self._free):
            raise ValueError(f"{missing} more blocks are needed, {len(self._free)} of {self.count} are free")
        first = len(held)
        held.extend(self._free.pop() for _ in range(missing))
        return list(enumerate(held[first:], first))

    def shrink(self, holder: int, length: int) -> None:
        """Take all but the first `length` blocks from `holder`; those that nobody else holds are free."""
        held = self._held.get(holder, [])
        for block in held[length:]:
            others = self._holders.pop(block, 1) - 1
            if others == 0:
                self._free.append(block)
            elif others > 1:
                self._holders[block] = others
        del held[length:]
        if not held:
            self._held.pop(holder, None)

    def share(self, donor: int, holder: int, length: int) -> None:
        """Let `holder`, which has none, hold the first `length` blocks of `donor` too."""
        shared = self._held[donor][:length]
        for block in shared:
            self._holders[block] = self._holders.get(block, 1) + 1
        self._held[holder] = list(shared)

    def rename(self, old: int, new: int) -> None:
        """Give all that `old` holds to `new`, which has none."""
        self._held[new] = self._held.pop(old)

    def separate(self, holder: int, index: int) -> tuple[int, int] | None:
        """Give `holder` a block of its own at `index`: (old, new) where others hold the old one too, else None."""
        old = self._held[holder][index]
        others = self._holders.get(old, 1) - 1
        if others == 0:
            return None
        if not self._free:
            raise ValueError(f"one more block is needed, none of {self.count} is free")
        new = self._held[holder][index] = self._free.pop()
        if others == 1:
            del self._holders[old]
        else:
            self._holders[old] = others
        return old, new
