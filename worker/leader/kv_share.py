"""The KV memory that a replica may have, as its host's assignment says: less, once others need it."""

from __future__ import annotations

from control.messages import Assignment, ModelAssets
from control.placement import farm
from control.placement.need import KVCost
from control.records import catalog
from control.redis.connection import Call


class KvShare:
    """Over all epochs of a leader process. The share of a replica only falls while it lives."""

    def __init__(self, host_id: str, model: str, replica: str) -> None:
        self.reading = farm.assignment_of(host_id, model, replica)
        """Reads what `take` takes; the heartbeat does so with each beat."""
        self.assets: ModelAssets | None = None
        """As they were published."""
        self._model = model
        self._tokens: int | None = None

    def take(self, assignment: Assignment | None) -> None:
        """Note what the assignment says; for any thread."""
        tokens = None if assignment is None else assignment.kv_limit
        if tokens is not None:
            self._tokens = self.within(tokens)

    def within(self, tokens: int) -> int:
        """So many tokens, or the share where that is less."""
        return tokens if self._tokens is None else min(tokens, self._tokens)

    def publication(self, tokens: int, cost: KVCost) -> list[Call[bool]]:
        """Tells API processes that sequences may have so many tokens."""
        if self.assets is None or self.assets.kv_tokens == tokens:
            return []
        self.assets = self.assets.with_kv(tokens, cost.longest(tokens, self.assets.context_length))
        return [catalog.put_assets(self._model, self.assets)]
