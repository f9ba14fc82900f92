"""The KV memory that sequences take, as ranks, leaders and planners count it."""

from __future__ import annotations

import msgspec

CHUNK_TOKENS = 512
"""The most tokens of a sequence that one step adds on a CPU."""
FREED_TOKENS = 256
"""Positions behind a window that are freed together, at most."""
AHEAD_TOKENS = 256
"""Positions that ranks may have cached of a running sequence beyond those that its leader knows of."""


class KVCost(msgspec.Struct, frozen=True):
    """Memory is counted in tokens: one is a position of all layers. A layer with a sliding window keeps only the last
    positions of a sequence, so that a long one takes fewer tokens than it has positions."""

    block_tokens: int = 1
    """Memory is handed out in blocks of so many positions."""
    state_tokens: int = 0
    """Those of the recurrent state of a sequence."""
    window: int = 0
    """Positions that a layer with a window sees; 0: memory of such layers is not freed."""
    windowed_bytes: int = 0
    """Of a position in the layers with windows."""
    bytes: int = 1
    """Of a position in all layers."""

    @property
    def _together(self) -> int:
        """Positions that are freed together."""
        return min(FREED_TOKENS, self.window)

    @property
    def _in_windows(self) -> int:
        """The most positions that layers with windows keep of a sequence: those between two steps, and a step's own."""
        return self.window + 2 * self._together + CHUNK_TOKENS

    def rounded(self, positions: int) -> int:
        """The tokens that a sequence of `positions` takes; 0 for none."""
        if not positions:
            return 0
        taken = positions
        if self.window and positions > self._in_windows:
            whole = positions - self._in_windows
            taken = self._in_windows - -whole * (self.bytes - self.windowed_bytes) // self.bytes
        return -(-taken // self.block_tokens) * self.block_tokens + self.state_tokens

    def longest(self, tokens: int, context: int) -> int:
        """The positions of the longest sequence that `tokens` hold, at most `context`."""
        rest = tokens - self.state_tokens
        if not self.window or rest <= self._in_windows:
            return max(0, min(rest, context))
        each = self.bytes - self.windowed_bytes
        return context if not each else min(context, self._in_windows + (rest - self._in_windows) * self.bytes // each)

    def freed(self, positions: int) -> int:
        """Of a sequence of `positions`, how many of the first ones layers with windows keep no more."""
        if not self.window:
            return 0
        return max(0, (positions - self.window - self._together) // self._together * self._together)

    @property
    def copy_tokens(self) -> int:
        """The tokens of a copy with which another sequence can begin where the sequence itself has gone on: of the
        recurrent state, and of what layers with windows keep."""
        positions = self.window + 2 * self._together if self.window else 0
        return self.state_tokens - -positions * self.windowed_bytes // self.bytes


PLAIN = KVCost()
"""Each position takes one token."""
