"""Copies of recurrent states: the positions of a prompt at which the ranks keep one, and their memory.

A sequence of a model with recurrent layers can begin with another's KV only where a copy of the state was kept, or at
the other's end. A copy of a running sequence is kept memory, as an ended sequence is: it goes before a sequence is
preempted or has to wait.
"""

from __future__ import annotations

from worker.scheduling.kv import KVAccount
from worker.scheduling.sequence import Sequence

CLOSING_TOKENS = 16
"""Tokens of a prompt's end that a chat's next turn may have otherwise: the head of the answer."""
INTERVAL_TOKENS = 1024
"""Tokens of a prompt from one copy to the next; more where a copy takes more memory than so many tokens."""


class Snapshots:
    """The copies of running sequences, in the order of their coming. `shortest` is the shortest beginning that is
    shared."""

    def __init__(self, account: KVAccount, shortest: int) -> None:
        self._account, self._shortest = account, shortest
        interval = max(INTERVAL_TOKENS, account.state_tokens)
        self._interval = -(-interval // shortest) * shortest
        self._holders: dict[int, Sequence] = {}
        """Running sequences that have copies, by sid."""
        self._dropped: list[int] = []
        """Sids of which the ranks shall forget the copies before the next step."""

    @property
    def settled(self) -> bool:
        """True if the ranks have been told everything."""
        return not self._dropped

    @property
    def tokens(self) -> int:
        """The memory of all copies of running sequences."""
        return self._account.state_tokens * sum(len(holder.snapshots) for holder in self._holders.values())

    def plan(self, sequence: Sequence, alike: int) -> None:
        """Plan the copies of a sequence that begins now: where the beginning ends that it shares with others, which
        has `alike` tokens; before its prompt's end; and at intervals."""
        last = (len(sequence.prompt) - CLOSING_TOKENS) // self._shortest * self._shortest
        most = last - self._interval // 2
        places = {last, min(alike, last), *range(self._interval, most, self._interval)}
        sequence.planned_snapshots = sorted(place for place in places if place > sequence.cached)

    def place(self, donor: Sequence, most: int) -> int:
        """The last of the donor's first `most` positions behind which the ranks have a state, 0 for none."""
        ends = [donor.cached] if donor.end_known else []
        return max((place for place in (*donor.snapshots, *ends) if place <= most), default=0)

    def promised(self, donor: Sequence, most: int) -> int:
        """As `place`, of a sequence in its prefill, when that will be through."""
        places = (*donor.snapshots, *donor.planned_snapshots)
        return max((place for place in places if place <= most), default=0)

    def due(self, sequence: Sequence, count: int) -> int | None:
        """How many of a sequence's next `count` tokens end at a planned copy; None where there is none."""
        planned = sequence.planned_snapshots
        while planned and planned[0] <= sequence.cached:
            planned.pop(0)
        return planned[0] - sequence.cached if planned and planned[0] <= sequence.cached + count else None

    def take(self, sequence: Sequence, place: int) -> bool:
        """Reserve memory for a copy at `place`; False, and nothing changed, where something must be let go first."""
        if not self._account.add_snapshot(sequence.sid):
            return False
        sequence.snapshots.append(place)
        self._holders[sequence.sid] = sequence
        return True

    def hand_over(self, donor: Sequence, sequence: Sequence, count: int) -> None:
        """A sequence takes over the donor's copies among its first `count` positions."""
        sequence.snapshots = [place for place in donor.snapshots if place <= count]
        donor.snapshots = [place for place in donor.snapshots if place > count]
        self._account.move_snapshots(donor.sid, sequence.sid, len(sequence.snapshots))
        if sequence.snapshots:
            self._holders[sequence.sid] = sequence

    def drop_oldest(self) -> None:
        """Let go of the copies of the running sequence that has some for longest."""
        sid, sequence = next(iter(self._holders.items()))
        del self._holders[sid]
        self._account.drop_snapshots(sid)
        sequence.snapshots = []
        self._dropped.append(sid)

    def left(self, sid: int) -> None:
        """The sequence runs no more: its copies are let go of with the rest of its memory."""
        self._holders.pop(sid, None)

    def tell(self, known: set[int]) -> list[int]:
        """The sids of `known` whose copies the ranks shall forget; they are told now."""
        dropped, self._dropped = [sid for sid in self._dropped if sid in known], []
        return dropped
