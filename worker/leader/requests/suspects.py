"""Which requests may be what crashes a group, and how to find out: pure bookkeeping, one step of it per epoch.

The docket is written down before a step that may crash, so that the next leader knows what was in it even where the
crash took the leader's own process. It is read again when the next epoch has adopted, together with how the last one
ended and how far each request has come meanwhile.

Two crashes make suspects: whoever was in the second one's step and had not got on since it was adopted. Suspects are
tried in halves. A half that crashes holds a culprit and is halved again; one that gets on is cleared. With one culprit
among n suspects each halving costs at most one crash, so ceil(log2 n) crashes follow the first two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

OWN_FAULTS = frozenset({"step_failed", "forward_failed", "crashed"})
"""Kinds of poison that nobody outside the group can cause. Every other kind (a kill, a hang, a lost peer) may come
from outside, whatever ran just then."""
LONE_KILLS = 3
"""Ends that may come from outside, each in a request's lone step and without progress in between, that condemn it."""
PROOF_TOKENS = 2
"""Tokens of each choice that acquit: the first comes from a prefill, only the second from a decode."""


class Docket(msgspec.Struct, frozen=True):
    """What is known so far. Rids are in order of adoption; `guilty` and `rest` are empty while nobody is a suspect."""

    epoch: int = 0
    """The epoch whose step `tried` describes."""
    tried: dict[str, int] = {}
    """Requests in that step that had not got on, with the seq by which each will have."""
    alone: bool = False
    """Whether all rows of that step belonged to one request."""
    guilty: list[str] = []
    """The smallest set that is known to have crashed together."""
    rest: list[str] = []
    """Suspects to be tried afterwards, of whom nothing else is known."""
    lone: dict[str, int] = {}
    """How often a request was alone when its group was ended by what may have come from outside."""

    def joined(self, other: Docket) -> Docket:
        """With what `other` knows: the suspects that another replica left. Both have been judged."""
        known = set(self.suspects)
        first = [rid for rid in other.guilty if rid not in known]
        later = [rid for rid in other.rest if rid not in known]
        merged = {rid: max(self.lone.get(rid, 0), other.lone.get(rid, 0)) for rid in self.lone | other.lone}
        if not self.suspects:
            return msgspec.structs.replace(self, guilty=first, rest=later, lone=merged)
        return msgspec.structs.replace(self, rest=[*self.rest, *first, *later], lone=merged)

    @property
    def suspects(self) -> list[str]:
        return [*self.guilty, *self.rest]

    @property
    def trial(self) -> list[str]:
        """Whom to run next with nobody else: half of those who crashed together, or all of whom nothing is known."""
        if len(self.guilty) > 1:
            return self.guilty[: len(self.guilty) // 2]
        return self.guilty or self.rest

    def record(self, epoch: int, tried: dict[str, int], alone: bool) -> Docket:
        """As it must be written down before a step of `epoch` with these rows."""
        return msgspec.structs.replace(self, epoch=epoch, tried=tried, alone=alone)

    def without(self, rids: Collection[str]) -> Docket:
        """`rids` have got on, or have ended: they are no suspects any more."""
        return Docket(
            epoch=self.epoch,
            tried={rid: goal for rid, goal in self.tried.items() if rid not in rids},
            alone=self.alone,
            guilty=[rid for rid in self.guilty if rid not in rids],
            rest=[rid for rid in self.rest if rid not in rids],
            lone={rid: count for rid, count in self.lone.items() if rid not in rids},
        )

    def judged(self, end: str | None, seqs: Mapping[str, int]) -> tuple[Docket, str | None]:
        """What follows from the end of `epoch`, and the request to bury, if one is condemned.

        `end` is the kind of poison that the epoch ended with, None where it ended without (a lost lock, an orderly
        stop): then nobody is accused, and a trial is repeated. `seqs` holds the last seq of each request that was
        adopted now; those that are missing have ended. The same facts may be judged again, to the same verdict.
        """
        moved = [rid for rid, goal in self.tried.items() if seqs.get(rid, goal) >= goal]
        gone = [rid for rid in self.suspects if rid not in seqs]
        stuck = [rid for rid in self.tried if rid not in moved]
        known = self.without([*moved, *gone])
        if end is None or not stuck:
            return msgspec.structs.replace(known, tried={}), None
        rest = [rid for rid in known.suspects if rid not in stuck]
        if len(stuck) > 1 or not self.alone:
            return Docket(guilty=stuck, rest=rest, lone=known.lone), None
        [culprit] = stuck
        count = known.lone.get(culprit, 0) + (end not in OWN_FAULTS)
        if end in OWN_FAULTS or count >= LONE_KILLS:
            return Docket(rest=rest, lone=known.without(stuck).lone), culprit
        return Docket(guilty=stuck, rest=rest, lone=known.lone | {culprit: count}), None


decode_docket = msgspec.json.Decoder(Docket).decode
