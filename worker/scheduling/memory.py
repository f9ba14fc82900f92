"""The ranks' KV memory as the leader accounts for it: reservations, what is kept of ended sequences, and what the ranks
have yet to be told about both."""

from __future__ import annotations

from dataclasses import replace

from control.commands import Prefix
from worker.scheduling.kv import KVAccount
from worker.scheduling.plan import StepPlan
from worker.scheduling.prefixes.prefix_cache import BLOCK_TOKENS, PrefixCache, Start
from worker.scheduling.prefixes.snapshots import Snapshots
from worker.scheduling.sequence import Sequence


class Memory:
    def __init__(self, kv_tokens: int, block_tokens: int, prefix_tokens: int | None, state_tokens: int = 0) -> None:
        self.account = KVAccount(kv_tokens, block_tokens, state_tokens)
        self.snapshots = Snapshots(self.account, prefix_tokens or BLOCK_TOKENS) if state_tokens else None
        self.prefixes = PrefixCache(prefix_tokens or BLOCK_TOKENS, self.snapshots)
        self._shares = prefix_tokens is not None
        self.isolating = False
        """True if no sequence may begin with another's KV just now, and none is kept."""
        self.known: set[int] = set()
        """Sids whose KV the ranks hold."""
        self._left: list[int] = []
        """Sids that the ranks shall forget before the next step."""
        self._kept: list[int] = []
        """Sids of ended sequences whose KV the ranks shall keep, and have not been told so."""

    @property
    def settled(self) -> bool:
        """True if the ranks have been told everything."""
        return not (self._left or self._kept) and (self.snapshots is None or self.snapshots.settled)

    @property
    def _sharing(self) -> bool:
        return self._shares and not self.isolating

    def find(self, sequence: Sequence) -> Start:
        """The longest beginning that the sequence can take over from another."""
        return self.prefixes.find(sequence) if self._sharing else Start()

    def admit(self, sequence: Sequence, start: Start, *, spare: int) -> bool:
        """Reserve KV for all of a sequence's context. A donor that is let go for it hands its own KV over."""
        if not self.account.fits(sequence.sid, sequence.length, spare=spare):
            return False
        if not self.prefixes.use(start):
            if self.snapshots is not None:
                self.snapshots.hand_over(self.prefixes.sequence(start.donor), sequence, start.count)
            self.forget(start.donor)
        return self.reserve(sequence.sid, sequence.length, spare=spare)

    def reserve(self, sid: int, tokens: int, *, spare: int = 0) -> bool:
        """Reserve KV, letting go of what is kept as far as that helps, the longest unused first."""
        if not self.account.fits(sid, tokens, spare=spare):
            return False
        while not self.account.reserve(sid, tokens, spare=spare):
            if self.snapshots is None or self.prefixes.kept:
                self.forget(self.prefixes.kept[0])
            else:
                self.snapshots.drop_oldest()
        return True

    def begin(self, plan: StepPlan, sequence: Sequence, start: Start) -> None:
        """An admitted sequence begins with `start`."""
        plan.begin(sequence)
        if start.count:
            taken_over = bool(sequence.snapshots)
            plan.change.prefixes.append(Prefix(sequence.sid, start.donor, start.count, taken_over))
        sequence.cached = sequence.cached_prompt_tokens = start.count
        if self.snapshots is not None and self._sharing:
            self.snapshots.plan(sequence, start.alike)

    def until_snapshot(self, sequence: Sequence, count: int, *, spare: int) -> int | None:
        """How many of the next `count` tokens of a sequence end where the ranks are to keep a copy of its state, for
        which memory is reserved; None where there is no such place, or no room but that of other copies."""
        snapshots, account = self.snapshots, self.account
        if snapshots is None or not self._sharing or (due := snapshots.due(sequence, count)) is None:
            return None
        if account.free - snapshots.tokens < account.state_tokens + spare:
            return None
        while not snapshots.take(sequence, sequence.cached + due):
            self.forget(self.prefixes.kept[0])
        return due

    def end(self, sequence: Sequence) -> None:
        """The sequence goes. What it leaves is kept as long as there is room, where others can begin with it."""
        if self.snapshots is not None:
            self.snapshots.left(sequence.sid)
        if self._sharing and self.prefixes.keep(sequence):
            self.account.keep(sequence.sid)
            self._kept.append(sequence.sid)
        else:
            self.forget(sequence.sid)

    def preempt(self, sequence: Sequence) -> None:
        """As `end`, for a sequence that goes on under another sid, and may begin with what it left."""
        if sequence.sid in self.prefixes.known:
            # The index keeps the context as it is now, while the sequence grows.
            self.prefixes.follow(replace(sequence, output=list(sequence.output), blocks=list(sequence.blocks)))
        self.end(sequence)
        sequence.snapshots, sequence.planned_snapshots = [], []

    def forget(self, sid: int) -> None:
        if self.snapshots is not None:
            self.snapshots.left(sid)
        self.account.release(sid)
        self.prefixes.forget(sid)
        if sid in self.known:
            self.known.remove(sid)
            self._left.append(sid)

    def forget_kept(self) -> None:
        for kept in self.prefixes.kept:
            self.forget(kept)

    def tell(self, plan: StepPlan) -> None:
        """Let the plan tell the ranks what they shall keep and forget."""
        change = plan.change
        self.known.update(row.sid for row in change.rows)
        change.left, self._left = self._left, []
        change.kept, self._kept = [sid for sid in self._kept if self.prefixes.is_kept(sid)], []
        if self.snapshots is not None:
            change.dropped_snapshots = self.snapshots.tell(self.known)
            plan.mark_snapshots()
