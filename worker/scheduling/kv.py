"""The account of KV memory by sequence. The ranks hold the memory itself."""

from __future__ import annotations


class KVAccount:
    """Tokens of KV memory by sequence, in whole blocks, on the rank with the least. Every rank holds the same
    sequences."""

    def __init__(self, capacity: int, block_tokens: int = 1, state_tokens: int = 0) -> None:
        """`state_tokens`: what the recurrent state of each sequence takes beside its positions."""
        if capacity < 1 or block_tokens < 1:
            raise ValueError(f"KV capacity and block size must be positive, got {capacity} and {block_tokens} tokens")
        self.capacity = capacity // block_tokens * block_tokens
        self._block, self.state_tokens = block_tokens, state_tokens
        self._held: dict[int, int] = {}
        self._snapshots: dict[int, int] = {}
        """Sequence → the number of copies of its recurrent state."""
        self._kept: set[int] = set()
        self.used = 0
        """Tokens reserved by all holders together, copies of states included."""
        self.kept = 0
        """Tokens of holders that can be released when room is needed, and of all copies of states."""

    @property
    def free(self) -> int:
        """Tokens that can be reserved: those that no sequence holds, and those that are only kept."""
        return self.capacity - self.used + self.kept

    @property
    def snapshots(self) -> dict[int, int]:
        """The number of copies of states by holder."""
        return dict(self._snapshots)

    @property
    def holders(self) -> dict[int, int]:
        return dict(self._held)

    def held(self, sid: int) -> int:
        return self._held.get(sid, 0)

    def rounded(self, tokens: int) -> int:
        """The tokens of memory that a sequence of `tokens` holds; 0 for none."""
        return -(-tokens // self._block) * self._block + (self.state_tokens if tokens else 0)

    def fits(self, sid: int, tokens: int, *, spare: int = 0) -> bool:
        """True if `sid` can come to hold `tokens` in all, with `spare` left free."""
        more = self.rounded(tokens) - self._held.get(sid, 0)
        return more <= 0 or more + spare <= self.free

    def reserve(self, sid: int, tokens: int, *, spare: int = 0) -> bool:
        """Let `sid` hold `tokens` in all; False, and nothing changed, where something must be let go for that first."""
        more = self.rounded(tokens) - self._held.get(sid, 0)
        if more > 0 and more + spare > self.capacity - self.used:
            return False
        if more > 0:
            self._held[sid] = self._held.get(sid, 0) + more
            self.used += more
        return True

    def can_grow(self, tokens: dict[int, int]) -> bool:
        """True if `reserve` would succeed for all of these, one after the other."""
        more = sum(max(0, self.rounded(count) - self._held.get(sid, 0)) for sid, count in tokens.items())
        return more <= self.capacity - self.used

    def add_snapshot(self, sid: int) -> bool:
        """Let `sid` hold one more copy of its state; False, and nothing changed, where something must be let go for
        that first."""
        if self.state_tokens > self.capacity - self.used:
            return False
        self._change_snapshots(sid, 1)
        return True

    def move_snapshots(self, sid: int, heir: int, count: int) -> None:
        """Give `count` of the copies that `sid` holds to `heir`."""
        self._change_snapshots(sid, -count)
        self._change_snapshots(heir, count)

    def drop_snapshots(self, sid: int) -> None:
        self._change_snapshots(sid, -self._snapshots.get(sid, 0))

    def _change_snapshots(self, sid: int, more: int) -> None:
        count = self._snapshots.pop(sid, 0) + more
        self._snapshots |= {sid: count} if count else {}
        self.used += more * self.state_tokens
        self.kept += more * self.state_tokens

    def keep(self, sid: int) -> None:
        """Mark the tokens of `sid` as kept: they may be released for others."""
        self._kept.add(sid)
        self.kept += self._held.get(sid, 0)

    def release(self, sid: int) -> None:
        self.drop_snapshots(sid)
        held = self._held.pop(sid, 0)
        self.used -= held
        if sid in self._kept:
            self._kept.remove(sid)
            self.kept -= held
