"""KV memory as the leader accounts for it; the ranks hold the memory itself.

`KVAccount` counts what each sequence reserves. `PrefixCache` keeps ended sequences and finds those with which another
can begin: an index over tokens whose KV the ranks hold. The index is a hash chain: the hash of a block covers its
tokens and the block before it. A hash only finds candidates; salts, tokens, and the digests of images, are compared.

`Snapshots` has the copies of recurrent states, and of what layers with windows keep: a sequence of a model with
recurrent layers can begin with another's KV only where a copy was kept, or at the other's end; of one with windows also
where all that they see is kept yet. A copy of a running sequence is kept memory, as an ended sequence is:
it goes before a sequence is preempted or has to wait. `KVMemory` is all three, and what the ranks have yet to be told.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from control.commands import Prefix
from control.placement.need import AHEAD_TOKENS, PLAIN, KVCost
from worker.scheduling.sequence import Sequence, SequenceState, StepPlan

BLOCK_TOKENS = 64
"""The shortest prefix that is looked for: copying it costs a step more than computing a few tokens would."""
CLOSING_TOKENS = 16
"""Tokens of a prompt's end that a chat's next turn may have otherwise: the head of the answer."""
INTERVAL_TOKENS = 1024
"""Tokens of a prompt from one copy to the next; more where a copy takes more memory than so many tokens."""


class KVAccount:
    """Tokens of KV memory by sequence, in whole blocks, on the rank with the least. Every rank holds the same
    sequences."""

    def __init__(self, capacity: int, cost: KVCost = PLAIN) -> None:
        """`cost`: what sequences take."""
        if capacity < 1 or cost.block_tokens < 1:
            raise ValueError(f"KV capacity and block size must be positive, got {capacity} and {cost.block_tokens}")
        self.cost = cost
        self._block = cost.block_tokens
        self.capacity = capacity // self._block * self._block
        self._tokens_by_sid: dict[int, int] = {}
        self._snapshots: dict[int, int] = {}
        """Sequence → the number of its copies (see `Snapshots`)."""
        self._kept_sids: set[int] = set()
        self.used = 0
        """Tokens reserved by all holders together, copies of states included."""
        self.releasable = 0
        """Tokens of holders that can be released when room is needed, and of all copies of states."""

    @property
    def free(self) -> int:
        """Tokens that can be reserved: those that no sequence holds, and those that are only kept."""
        return self.capacity - self.used + self.releasable

    @property
    def snapshots(self) -> dict[int, int]:
        """The number of copies of states by holder."""
        return dict(self._snapshots)

    @property
    def holders(self) -> dict[int, int]:
        return dict(self._tokens_by_sid)

    def held(self, sid: int) -> int:
        return self._tokens_by_sid.get(sid, 0)

    def rounded(self, tokens: int) -> int:
        """The tokens of memory that a sequence of `tokens` holds; 0 for none."""
        return self.cost.rounded(tokens)

    def fits(self, sid: int, tokens: int, *, spare: int = 0) -> bool:
        """True if `sid` can come to hold `tokens` in all, with `spare` left free."""
        more = self.rounded(tokens) - self._tokens_by_sid.get(sid, 0)
        return more <= 0 or more + spare <= self.free

    def reserve(self, sid: int, tokens: int, *, spare: int = 0) -> bool:
        """Reserve `tokens` in all for `sid`; False, without a change, if other memory must be released first."""
        more = self.rounded(tokens) - self._tokens_by_sid.get(sid, 0)
        if more > 0 and more + spare > self.capacity - self.used:
            return False
        if more > 0:
            self._tokens_by_sid[sid] = self._tokens_by_sid.get(sid, 0) + more
            self.used += more
        return True

    def can_grow(self, tokens: dict[int, int]) -> bool:
        """True if `reserve` would succeed for all of these, one after the other."""
        more = sum(max(0, self.rounded(count) - self._tokens_by_sid.get(sid, 0)) for sid, count in tokens.items())
        return more <= self.capacity - self.used

    def add_snapshot(self, sid: int) -> bool:
        """Reserve one more copy of its state for `sid`; False, without a change, if other memory must be released
        first."""
        if self.cost.copy_tokens > self.capacity - self.used:
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
        self.used += more * self.cost.copy_tokens
        self.releasable += more * self.cost.copy_tokens

    def keep(self, sid: int) -> None:
        """Mark the tokens of `sid` as kept: they may be released for others."""
        self._kept_sids.add(sid)
        self.releasable += self._tokens_by_sid.get(sid, 0)

    def lower(self, capacity: int) -> None:
        """Let all holders together have no more than this, or than what they have now."""
        self.capacity = min(self.capacity, max(self.used, capacity) // self._block * self._block)

    def release(self, sid: int) -> None:
        self.drop_snapshots(sid)
        tokens = self._tokens_by_sid.pop(sid, 0)
        self.used -= tokens
        if sid in self._kept_sids:
            self._kept_sids.remove(sid)
            self.releasable -= tokens


class Snapshots:
    """The copies of running sequences, in the order of their coming. `shortest` is the shortest beginning that is
    shared."""

    def __init__(self, account: KVAccount, shortest: int) -> None:
        self._account = account
        self._shortest = shortest
        interval = max(INTERVAL_TOKENS, account.cost.copy_tokens)
        self._interval = -(-interval // shortest) * shortest
        self._holders: dict[int, Sequence] = {}
        """Running sequences that have copies, by sid."""
        self._dropped: list[int] = []
        """Sids of which the ranks shall forget the copies before the next step."""

    @property
    def settled(self) -> bool:
        """True if the ranks know of every change."""
        return not self._dropped

    @property
    def tokens(self) -> int:
        """The memory of all copies of running sequences."""
        return self._account.cost.copy_tokens * sum(len(holder.snapshots) for holder in self._holders.values())

    def plan(self, sequence: Sequence, alike: int) -> None:
        """Plan the copies of a sequence that begins now: where the beginning ends that it shares with others, which
        has `alike` tokens; before its prompt's end; and at intervals."""
        cost = self._account.cost
        if not (cost.state_tokens or cost.freed(sequence.longest)):  # it keeps all its positions
            sequence.planned_snapshots = []
            return
        last = (len(sequence.prompt) - CLOSING_TOKENS) // self._shortest * self._shortest
        most = last - self._interval // 2
        places = {last, min(alike, last), *range(self._interval, most, self._interval)}
        cached = sequence.cached
        counts = {sequence.beside_images(place - cached) for place in places if place > cached}
        sequence.planned_snapshots = sorted(cached + count for count in counts)

    def place(self, donor: Sequence, most: int) -> int:
        """The last of the donor's first `most` positions behind which another can begin, 0 for none."""
        if self._account.cost.state_tokens:
            ends = [donor.cached] if donor.end_known else []
        else:
            ends = [most] if most >= self._seen_from(self._first(donor)) else []
        return max((place for place in (*donor.snapshots, *ends) if place <= most), default=0)

    def _seen_from(self, first: int) -> int:
        """The first position of which layers with windows keep all that it sees, where they keep those from `first`
        on."""
        return first + self._account.cost.window if first else 0

    def _first(self, donor: Sequence) -> int:
        """The first position that layers with windows surely keep of a sequence."""
        cached = donor.cached + (0 if donor.end_known else AHEAD_TOKENS)
        return max(donor.window_from, self._account.cost.freed(cached))

    def begin(self, sequence: Sequence, donor: Sequence | None, count: int) -> None:
        """Note what the ranks have of a sequence that begins with the first `count` positions of `donor`."""
        cost = self._account.cost
        if donor is None or not cost.window:
            sequence.window_from = 0
        elif count in donor.snapshots:
            sequence.window_from = max(donor.window_from, cost.freed(count))
        else:
            sequence.window_from = self._first(donor)

    def promised(self, donor: Sequence, most: int) -> int:
        """As `place`, of a sequence in its prefill, when that will be through."""
        places = [*donor.snapshots, *donor.planned_snapshots]
        cost = self._account.cost
        first = max(donor.window_from, cost.freed(donor.length + AHEAD_TOKENS))
        if not cost.state_tokens and most >= self._seen_from(first):
            places.append(most)
        return max((place for place in places if place <= most), default=0)

    def due(self, sequence: Sequence, count: int) -> int | None:
        """The number of a sequence's next `count` tokens up to a planned copy; None if there is none."""
        planned = sequence.planned_snapshots
        while planned and planned[0] <= sequence.cached:
            planned.pop(0)
        return planned[0] - sequence.cached if planned and planned[0] <= sequence.cached + count else None

    def take(self, sequence: Sequence, place: int) -> bool:
        """Reserve memory for a copy at `place`; False, without a change, if other memory must be released first."""
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

    def forget(self, sid: int) -> None:
        """Forget the copies of a sequence that has ended, with the rest of its memory."""
        self._holders.pop(sid, None)

    def take_dropped(self) -> list[int]:
        """The sids whose copies have been released since the last call."""
        dropped = self._dropped
        self._dropped = []
        return dropped


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The prefix with which a sequence can begin: with the first `count` positions of the donor's KV, or with nothing
    (0)."""

    donor: int = 0
    count: int = 0
    awaited: bool = False
    """True if a sequence that is still in its prefill will soon have clearly more."""
    alike: int = 0
    """Positions in whole blocks that some sequence has in common with it, which may be more."""


class PrefixCache:
    """Knows running sequences (`follow`) and keeps ended ones (`keep`), the one that was used longest ago first."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS, snapshots: Snapshots | None = None) -> None:
        """`snapshots`: a sequence can begin only where they say; None for a model whose layers keep all positions."""
        self._block = block_tokens
        self._snapshots = snapshots
        self._sequences: dict[int, Sequence] = {}
        self._holders: dict[int, dict[int, None]] = {}
        """Hash of a block → the sids that have it, in order of their coming."""
        self._indexed: dict[int, int] = {}
        """Sid → how many of its blocks are in the index."""
        self._kept_sids: OrderedDict[int, None] = OrderedDict()

    @property
    def ended(self) -> list[int]:
        """Sids of the ended sequences, the next to go first."""
        return list(self._kept_sids)

    @property
    def followed(self) -> set[int]:
        return set(self._sequences)

    def is_kept(self, sid: int) -> bool:
        return sid in self._kept_sids

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
        self._kept_sids[sequence.sid] = None
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
        self._kept_sids.pop(sid, None)

    def match(self, sequence: Sequence) -> PrefixMatch:
        """The longest beginning that some sequence's KV has; at least one token is left to be computed, and all whose
        logits are wanted."""
        best = PrefixMatch()
        promised = 0
        alike = 0
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
                    best = PrefixMatch(sid, count)
                    if count >= depth * self._block:
                        break
        if best.count < self._block:
            best = PrefixMatch()
        awaited = min(promised, sequence.reusable) >= best.count + self._block
        return PrefixMatch(best.donor, best.count, awaited, alike)

    def use(self, match: PrefixMatch) -> bool:
        """Note that a kept donor is used; False where so little of it is left over that it need not be kept beside."""
        if match.donor in self._kept_sids:
            self._kept_sids.move_to_end(match.donor)
            return self._sequences[match.donor].cached - match.count >= self._block
        return True

    def sequence(self, sid: int) -> Sequence:
        """A sequence that is known. Raises KeyError for another sid."""
        return self._sequences[sid]

    def _promised(self, donor: Sequence, most: int) -> int:
        return most if self._snapshots is None else self._snapshots.promised(donor, most)

    def _certain(self, sequence: Sequence) -> int:
        """Positions whose KV the ranks hold, proved by a token that was sampled from them: a prefill may yet fail."""
        if sequence.state is SequenceState.DECODE or sequence.sid in self._kept_sids:
            return sequence.cached
        return 0

    def _common(self, donor: Sequence, sequence: Sequence, most: int) -> int:
        """The length of the common prefix, as far as the donor is certain and the sequence can use it."""
        stop = min(most, self._certain(donor), sequence.reusable)
        ours = sequence.identity(0, stop)
        theirs = donor.identity(0, stop)
        if ours != theirs:
            stop = next(index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        return stop if self._snapshots is None else self._snapshots.place(donor, stop)

    def _blocks(self, sequence: Sequence) -> list[int]:
        """The hashes of the sequence's whole blocks; a context only grows, so they are made once."""
        blocks = sequence.blocks
        size = self._block
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
            "a kept prefix is of a sequence that runs": bool(running & self._kept_sids.keys()),
            "a prefix is indexed that nobody holds": self._sequences.keys() != running | self._kept_sids.keys(),
            "a prefix is filed under another sid": any(sid != s.sid for sid, s in self._sequences.items()),
            "the index of prefixes does not add up": counted
            != {sid: len(set(self._sequences[sid].blocks[:count])) for sid, count in self._indexed.items()},
        }
        return [fault for fault, present in faults.items() if present]


class KVMemory:
    """The memory of all ranks of a group. `prefix_tokens`: as of the scheduler."""

    def __init__(self, kv_tokens: int, cost: KVCost, prefix_tokens: int | None) -> None:
        self.account = KVAccount(kv_tokens, cost)
        self.snapshots = Snapshots(self.account, prefix_tokens or BLOCK_TOKENS) if cost.copy_tokens else None
        self.prefixes = PrefixCache(prefix_tokens or BLOCK_TOKENS, self.snapshots)
        self._shares = prefix_tokens is not None
        self.isolating = False
        """True if no sequence may begin with another's KV just now, and none is kept."""
        self.resident: set[int] = set()
        """Sids whose KV the ranks hold."""
        self._left_sids: list[int] = []
        """Sids that the ranks shall forget before the next step."""
        self._kept_sids: list[int] = []
        """Sids of ended sequences whose KV the ranks shall keep, and have not been told so."""

    @property
    def settled(self) -> bool:
        """True if the ranks know of every change."""
        return not (self._left_sids or self._kept_sids) and (self.snapshots is None or self.snapshots.settled)

    @property
    def _sharing(self) -> bool:
        return self._shares and not self.isolating

    def match_prefix(self, sequence: Sequence) -> PrefixMatch:
        """The longest beginning that the sequence can take over from another."""
        return self.prefixes.match(sequence) if self._sharing else PrefixMatch()

    def admit(self, sequence: Sequence, match: PrefixMatch, *, spare: int) -> bool:
        """Reserve KV for all of a sequence's context. A donor that is released for it hands its own KV over."""
        if not self.account.fits(sequence.sid, sequence.length, spare=spare):
            return False
        if self.snapshots is not None:
            donor = self.prefixes.sequence(match.donor) if match.count else None
            self.snapshots.begin(sequence, donor, match.count)
        if not self.prefixes.use(match):
            if self.snapshots is not None:
                self.snapshots.hand_over(self.prefixes.sequence(match.donor), sequence, match.count)
            self.forget(match.donor)
        return self.reserve(sequence.sid, sequence.length, spare=spare)

    def reserve(self, sid: int, tokens: int, *, spare: int = 0) -> bool:
        """Reserve KV, letting go of what is kept as far as that helps, the longest unused first."""
        if not self.account.fits(sid, tokens, spare=spare):
            return False
        while not self.account.reserve(sid, tokens, spare=spare):
            self._let_go()
        return True

    def begin(self, plan: StepPlan, sequence: Sequence, match: PrefixMatch) -> None:
        """An admitted sequence begins with `match`."""
        plan.begin(sequence)
        if match.count:
            taken_over = bool(sequence.snapshots)
            plan.change.prefixes.append(Prefix(sequence.sid, match.donor, match.count, taken_over))
        sequence.cached = sequence.cached_prompt_tokens = match.count
        if self.snapshots is not None and self._sharing:
            self.snapshots.plan(sequence, match.alike)

    def until_snapshot(self, sequence: Sequence, count: int, *, spare: int) -> int | None:
        """The number of a sequence's next `count` tokens up to the position where the ranks are to keep a copy of its
        state, for which memory is reserved; None where there is no such place, or no room but that of other copies."""
        snapshots = self.snapshots
        account = self.account
        if snapshots is None or not self._sharing or (due := snapshots.due(sequence, count)) is None:
            return None
        if account.free - snapshots.tokens < account.cost.copy_tokens + spare:
            return None
        while not snapshots.take(sequence, sequence.cached + due):
            self.forget(self.prefixes.ended[0])
        return due

    def end(self, sequence: Sequence) -> None:
        """The sequence goes. What it leaves is kept as long as there is room, where others can begin with it."""
        if self.snapshots is not None:
            self.snapshots.forget(sequence.sid)
        if self._sharing and self.prefixes.keep(sequence):
            self.account.keep(sequence.sid)
            self._kept_sids.append(sequence.sid)
        else:
            self.forget(sequence.sid)

    def preempt(self, sequence: Sequence) -> None:
        """As `end`, for a sequence that continues under another sid, and may begin with its own KV."""
        if sequence.sid in self.prefixes.followed:
            # The index keeps the context as it is now, while the sequence grows.
            self.prefixes.follow(replace(sequence, output=list(sequence.output), blocks=list(sequence.blocks)))
        self.end(sequence)
        sequence.snapshots = []
        sequence.planned_snapshots = []

    def forget(self, sid: int) -> None:
        if self.snapshots is not None:
            self.snapshots.forget(sid)
        self.account.release(sid)
        self.prefixes.forget(sid)
        if sid in self.resident:
            self.resident.remove(sid)
            self._left_sids.append(sid)

    def lower(self, capacity: int, *, spare: int) -> None:
        """Lower the capacity to so many tokens, as far as running sequences and `spare` allow. Kept memory is released
        as far as that helps, the longest unused first."""
        account = self.account
        while account.used + spare > capacity and self._can_let_go:
            self._let_go()
        account.lower(max(capacity, account.used + spare))

    @property
    def _can_let_go(self) -> bool:
        return bool(self.prefixes.ended or (self.snapshots is not None and self.snapshots.tokens))

    def _let_go(self) -> None:
        if self.snapshots is None or self.prefixes.ended:
            self.forget(self.prefixes.ended[0])
        else:
            self.snapshots.drop_oldest()

    def forget_kept(self) -> None:
        for sid in self.prefixes.ended:
            self.forget(sid)

    def add_changes(self, plan: StepPlan) -> None:
        """Write into the plan what the ranks shall keep and forget."""
        change = plan.change
        self.resident.update(row.sid for row in change.rows)
        change.left = self._left_sids
        self._left_sids = []
        change.kept = [sid for sid in self._kept_sids if self.prefixes.is_kept(sid)]
        self._kept_sids = []
        if self.snapshots is not None:
            change.dropped_snapshots = [sid for sid in self.snapshots.take_dropped() if sid in self.resident]
            plan.mark_snapshots()
