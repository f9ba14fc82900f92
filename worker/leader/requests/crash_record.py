"""The crash record: which requests may have crashed a group, and the next trial. Pure bookkeeping, one step per epoch.

The record is written before a step that may crash, because the crash may end the leader too. The next epoch reads it
with the end of the last one and the progress of each request.

Requests in the step of a second crash, without progress since their adoption, are suspects. Suspects are tried in
halves. A half that crashes is halved again; one that makes progress is cleared. With one culprit among n suspects at
most ceil(log2 n) crashes follow the first two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

OWN_FAULTS = frozenset({"step_failed", "forward_failed", "crashed"})
"""Kinds of poison that have their cause inside the group. Every other kind (a kill, a hang, a lost peer) may come
from outside, whatever ran just then."""
LONE_KILLS = 3
"""Ends of other kinds that make a request a dead letter: each in a step of its own, without progress between."""
PROOF_TOKENS = 2
"""Tokens of each choice that clear a request: the first comes from a prefill, only the second from a decode."""


class CrashRecord(msgspec.Struct, frozen=True):
    """The state of a crash isolation. Rids are in order of adoption."""

    epoch: int = 0
    """The epoch whose step `tried` describes."""
    tried: dict[str, int] = {}
    """Requests in that step that had not got on, with the seq by which each will have."""
    alone: bool = False
    """True if all rows of that step belonged to one request."""
    crashed_together: list[str] = msgspec.field(name="guilty", default_factory=list)
    """The smallest set that is known to have crashed together."""
    rest: list[str] = []
    """Suspects to be tried afterwards, of whom nothing else is known."""
    lone: dict[str, int] = {}
    """How often a request was alone when its group was ended by what may have come from outside."""

    def joined(self, other: CrashRecord) -> CrashRecord:
        """With what `other` knows: the suspects that another replica left. Both have been judged."""
        known = set(self.suspects)
        first = [rid for rid in other.crashed_together if rid not in known]
        later = [rid for rid in other.rest if rid not in known]
        merged = {rid: max(self.lone.get(rid, 0), other.lone.get(rid, 0)) for rid in self.lone | other.lone}
        if not self.suspects:
            return msgspec.structs.replace(self, crashed_together=first, rest=later, lone=merged)
        return msgspec.structs.replace(self, rest=[*self.rest, *first, *later], lone=merged)

    @property
    def suspects(self) -> list[str]:
        return [*self.crashed_together, *self.rest]

    @property
    def trial(self) -> list[str]:
        """The suspects to run next, alone: half of those that crashed together, else all the others."""
        if len(self.crashed_together) > 1:
            return self.crashed_together[: len(self.crashed_together) // 2]
        return self.crashed_together or self.rest

    def before_step(self, epoch: int, tried: dict[str, int], alone: bool) -> CrashRecord:
        """As it must be written down before a step of `epoch` with these rows."""
        return msgspec.structs.replace(self, epoch=epoch, tried=tried, alone=alone)

    def without(self, rids: Collection[str]) -> CrashRecord:
        """`rids` have got on, or have ended: they are no suspects any more."""
        return CrashRecord(
            epoch=self.epoch,
            tried={rid: goal for rid, goal in self.tried.items() if rid not in rids},
            alone=self.alone,
            crashed_together=[rid for rid in self.crashed_together if rid not in rids],
            rest=[rid for rid in self.rest if rid not in rids],
            lone={rid: count for rid, count in self.lone.items() if rid not in rids},
        )

    def judged(self, end: str | None, seqs: Mapping[str, int]) -> tuple[CrashRecord, str | None]:
        """The record after the end of `epoch`, and the request that becomes a dead letter, if one does. The same facts
        give the same result.

        `end` is the kind of the epoch's poison. None means that it ended without (a lost lock, an orderly stop): no
        request is suspected, and a trial is repeated. `seqs` holds the last seq of each adopted request; those that are
        missing have ended.
        """
        moved = [rid for rid, goal in self.tried.items() if seqs.get(rid, goal) >= goal]
        gone = [rid for rid in self.suspects if rid not in seqs]
        stuck = [rid for rid in self.tried if rid not in moved]
        known = self.without([*moved, *gone])
        if end is None or not stuck:
            return msgspec.structs.replace(known, tried={}), None
        rest = [rid for rid in known.suspects if rid not in stuck]
        if len(stuck) > 1 or not self.alone:
            return CrashRecord(crashed_together=stuck, rest=rest, lone=known.lone), None
        [culprit] = stuck
        count = known.lone.get(culprit, 0) + (end not in OWN_FAULTS)
        if end in OWN_FAULTS or count >= LONE_KILLS:
            return CrashRecord(rest=rest, lone=known.without(stuck).lone), culprit
        return CrashRecord(crashed_together=stuck, rest=rest, lone=known.lone | {culprit: count}), None


decode_record = msgspec.json.Decoder(CrashRecord).decode
