"""The scheduler's books compared with each other."""

from __future__ import annotations

from worker.scheduling.kv import KVAccount
from worker.scheduling.prefixes.prefix_cache import PrefixCache
from worker.scheduling.sequence import Flow, Sequence, SequenceState


def check(
    account: KVAccount, prefixes: PrefixCache, running: dict[int, Sequence], waiting: list[Sequence], known: set[int]
) -> None:
    """Raise RuntimeError naming what contradicts itself; `known` are the sids whose KV the ranks hold."""
    arrivals: dict[Flow, list[int]] = {}
    for sequence in [*running.values(), *waiting]:
        arrivals.setdefault(sequence.flow, []).append(sequence.arrival)
    holders, kept = account.holders, prefixes.kept
    copies = account.state_tokens * sum(account.snapshots.values())
    known_copies = {s.sid: len(s.snapshots) for s in [*running.values(), *map(prefixes.sequence, kept)] if s.snapshots}
    held = running.keys() | set(kept)
    faults = {
        "KV is held by a sequence that neither runs nor is kept, or the reverse": holders.keys() != held,
        "a sequence caches more than it reserved": any(s.cached > holders.get(s.sid, 0) for s in running.values()),
        "the KV account does not add up": sum(holders.values()) + copies != account.used,
        "the account of kept KV does not add up": sum(holders.get(sid, 0) for sid in kept) + copies != account.kept,
        "the copies of recurrent states do not add up": known_copies != account.snapshots,
        "more KV is reserved than there is": account.used > account.capacity,
        "sequences of a flow are out of their order of arrival": any(
            line != sorted(line) for line in arrivals.values()
        ),
        "a sequence is filed under another sid": any(sid != sequence.sid for sid, sequence in running.items()),
        "a waiting sequence is not in the state for it": any(s.state is not SequenceState.WAITING for s in waiting),
        "the ranks hold a sequence that neither runs nor is kept": not known <= held,
        "the ranks don't hold what is kept": not known >= set(kept),
    }
    found = [fault for fault, present in faults.items() if present] + prefixes.check_integrity(set(running))
    if found:
        raise RuntimeError(f"the scheduler lost its integrity: {'; '.join(found)}")
