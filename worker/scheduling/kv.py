"""Who holds how much KV memory: numbers only, the ranks hold the memory itself."""

from __future__ import annotations


class KVAccount:
    """Tokens of KV memory by sequence, on the tightest rank, rounded up to whole blocks.

    Every rank holds the same sequences, so the smallest capacity among them decides for all.
    """

    def __init__(self, capacity: int, block_tokens: int = 1) -> None:
        if capacity < 1 or block_tokens < 1:
            raise ValueError(f"KV capacity and block size must be positive, got {capacity} and {block_tokens} tokens")
        self.capacity = capacity // block_tokens * block_tokens
        self._block = block_tokens
        self._held: dict[int, int] = {}
        self.used = 0

    @property
    def free(self) -> int:
        return self.capacity - self.used

    @property
    def holders(self) -> dict[int, int]:
        """Reserved tokens by sid."""
        return dict(self._held)

    def rounded(self, tokens: int) -> int:
        """`tokens` in whole blocks."""
        return -(-tokens // self._block) * self._block

    def reserve(self, sid: int, tokens: int, *, spare: int = 0) -> bool:
        """Let `sid` hold `tokens` in all; False, and nothing changed, where less than `spare` would stay free."""
        more = self.rounded(tokens) - self._held.get(sid, 0)
        if more > 0 and more + spare > self.free:
            return False
        if more > 0:
            self._held[sid] = self._held.get(sid, 0) + more
            self.used += more
        return True

    def can_grow(self, tokens: dict[int, int]) -> bool:
        """Whether `reserve` would succeed for all of these, one after the other."""
        return sum(max(0, self.rounded(count) - self._held.get(sid, 0)) for sid, count in tokens.items()) <= self.free

    def release(self, sid: int) -> None:
        """Give back all that `sid` holds."""
        self.used -= self._held.pop(sid, 0)
