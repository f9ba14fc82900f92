"""The meeting of an epoch's ranks: through shared memory where all sit on one host's CPUs, else gloo or NCCL.

Rank 0 decides for all, so that none waits in a collective of another kind. Over a store that all ranks reach, which is
Redis in a farm:

    every rank   card/RANK     what it is and what it can do
    rank 0       offer         the memory, or why there is none
    the others   mapped/RANK   "mapped", or why they could not
    rank 0       verdict       "mapped", or why it is gloo all the same
    rank 0       group         without memory: the address of the store at which torch's group meets

Whatever the reason, it is one line in rank 0's log, and the group works.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from control.constants import MEETING_MS
from control.errors import CollectiveFailed
from control.keys import ReplicaKeys
from control.redis.clients import SyncRedis
from worker.collective import shared_memory
from worker.collective.base import Abort, Collective
from worker.collective.shared_memory import NativeExchange, Peers, Segment, SharedMemoryCollective
from worker.detectors import COLLECTIVE_S
from worker.selftest import switches

log = structlog.get_logger()


# The place where the ranks of an epoch meet: keys of Redis.


class RedisStore:
    """The keys by which the ranks of one epoch inform each other while they form a group. Each key outlives the time
    for which a rank waits for it."""

    def __init__(self, client: SyncRedis, keys: ReplicaKeys, epoch: int) -> None:
        self._client = client
        self._keys = keys
        self._epoch = epoch

    def set(self, key: str, value: str) -> None:
        self._client.set(self._keys.meeting(self._epoch, key), value, px=MEETING_MS)

    def check(self, keys: list[str]) -> bool:
        """True if every one of `keys` is there."""
        return all(self._client.exists(self._keys.meeting(self._epoch, key)) for key in keys)

    def get(self, key: str) -> bytes:
        """The value of a key that was there a moment ago; empty where it is gone."""
        return str(self._client.get(self._keys.meeting(self._epoch, key)) or "").encode()


POLL_S = 0.0005
MAPPED = "mapped"
NATIVE = "native"
"""The way of CPU ranks on hosts with a compiler: through memory that they share."""
HOST = "host"
"""The way of GPU ranks on which NCCL is switched off: over gloo, through the host's memory."""


class Store(Protocol):
    """Values by key, for all ranks. torch's stores have these methods too."""

    def set(self, key: str, value: str, /) -> None: ...

    def check(self, keys: list[str], /) -> bool:
        """True if every one of `keys` is there."""
        ...

    def get(self, key: str, /) -> bytes: ...


class Card(msgspec.Struct):
    """A rank's description of itself. `place` is equal on ranks that see each other's processes and memory."""

    pid: int
    place: str
    ways: list[str]
    refusal: str = ""
    """The reason why the rank can't share memory, or ""."""


class Offer(msgspec.Struct):
    """The memory that rank 0 has opened and the processes that share it, or the reason why none does."""

    refusal: str = ""
    way: str = NATIVE
    """For ranks of releases that had a second way."""
    descriptor: int = -1
    pids: list[int] = []
    through_host: bool = False
    """True if NCCL is switched off on a rank."""


def join(
    store: Store,
    rank: int,
    world_size: int,
    device: str,
    abort: Abort,
    shared: bool = True,
    address: str = "127.0.0.1",
) -> Collective:
    """Join the group that meets at `store`, which must be this epoch's alone; `shared` admits shared memory. At
    `address` others reach this rank. Raises CollectiveFailed or RuntimeError if another rank does not come,
    CollectiveLeft when told to leave."""
    card = card_of(device, shared)
    store.set(f"card/{rank}", msgspec.json.encode(card).decode())
    exchange, through_host = _lead(store, card, world_size, abort) if rank == 0 else _follow(store, rank, abort)
    if exchange is not None:
        return SharedMemoryCollective(exchange, rank, world_size)
    from worker.collective.torch.process_group import join_group, listen, reach  # only here: shared memory does without

    backend = "nccl" if device.startswith("cuda") and not through_host else "gloo"
    limit = timedelta(seconds=COLLECTIVE_S)
    if rank == 0:
        meeting, port = listen(address)
        store.set("group", f"{address}:{port}")
    else:
        meeting = reach(_wait(store, "group", abort).decode(), limit)
    return join_group(meeting, rank, world_size, backend, limit, through_host)


def card_of(device: str, shared: bool) -> Card:
    refusal = ""
    place = ""
    ways = list[str]()
    if not shared:
        refusal = "switched off"
    elif device != "cpu":
        refusal = f"it runs on {device}"
    else:
        place = namespace("pid")
        ways += [NATIVE] if shared_memory.library() is not None and _on("native") else []
        if not place:
            refusal = "its system does not tell which host it is"
        elif not ways:
            refusal = "it has no C++ compiler, or collective.native is switched off"
    if device != "cpu" and not _on("nccl"):
        ways += [HOST]
    return Card(os.getpid(), place, ways, refusal)


def _on(way: str) -> bool:
    return switches.reason_off(f"collective.{way}") is None


def namespace(kind: str) -> str:
    """The kernel's boot and this process's namespace: equal for processes that share it. Empty if not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path(f'/proc/self/ns/{kind}').readlink()}"
    except OSError:
        return ""


def refusal_of(cards: list[Card]) -> str:
    """The reason why these ranks can't share memory; empty if they can."""
    for rank, card in enumerate(cards):
        if card.refusal:
            return f"rank {rank}: {card.refusal}"
    if len({card.place for card in cards}) > 1:
        return "the ranks are on several hosts, or in several containers"
    if len(cards) > shared_memory.MOST_RANKS:
        return f"{len(cards)} ranks are more than {shared_memory.MOST_RANKS}"
    return "" if all(NATIVE in card.ways for card in cards) else "the ranks have no way in common"


def _lead(store: Store, own_card: Card, world_size: int, abort: Abort) -> tuple[NativeExchange | None, bool]:
    """Rank 0's part: the shared memory if there is any, and `Offer.through_host`."""
    other_cards = [_wait(store, f"card/{rank}", abort) for rank in range(1, world_size)]
    cards = [own_card, *(msgspec.json.decode(card, type=Card) for card in other_cards)]
    refusal = refusal_of(cards)
    descriptor = -1
    exchange: NativeExchange | None = None
    through_host = any(HOST in card.ways for card in cards)
    offer = Offer(pids=[card.pid for card in cards])
    try:
        if not refusal:
            try:
                offer.descriptor = descriptor = shared_memory.create(world_size)
                exchange = _map(offer, descriptor, 0, abort)
            except OSError as error:
                refusal = f"rank 0: {error}"
        store.set(
            "offer", msgspec.json.encode(Offer(refusal, through_host=through_host) if refusal else offer).decode()
        )
        if exchange is not None:
            answers = [_wait(store, f"mapped/{rank}", abort).decode() for rank in range(1, world_size)]
            refusal = next((f"rank {rank}: {why}" for rank, why in enumerate(answers, 1) if why != MAPPED), "")
            store.set("verdict", refusal or MAPPED)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if refusal:
        log.info("the ranks share no memory", why=refusal, action="form_group")
        return _given_up(exchange), through_host
    log.info("the ranks share memory", action="form_group")
    return exchange, False


def _follow(store: Store, rank: int, abort: Abort) -> tuple[NativeExchange | None, bool]:
    """Another rank's part."""
    offer = msgspec.json.decode(_wait(store, "offer", abort), type=Offer)
    if offer.refusal:
        return None, offer.through_host
    exchange = None
    answer = MAPPED
    try:
        descriptor = shared_memory.open_of(offer.pids[0], offer.descriptor)
        try:
            exchange = _map(offer, descriptor, rank, abort)
        finally:
            os.close(descriptor)
    except OSError as error:
        answer = str(error)
    store.set(f"mapped/{rank}", answer)
    mapped = _wait(store, "verdict", abort).decode() == MAPPED
    return exchange if mapped else _given_up(exchange), False


def _map(offer: Offer, descriptor: int, rank: int, abort: Abort) -> NativeExchange:
    """Raises OSError."""
    mapped = Segment(descriptor, rank, len(offer.pids))
    return NativeExchange(mapped, Peers(offer.pids, rank), abort)


def _given_up(exchange: NativeExchange | None) -> None:
    if exchange is not None:
        exchange.leave()


def _wait(store: Store, key: str, abort: Abort) -> bytes:
    """The value of `key`, once it is there. Asked for again and again, so that this rank can be told to leave."""
    deadline = time.monotonic() + COLLECTIVE_S
    while not store.check([key]):
        abort.check()
        if time.monotonic() > deadline:
            raise CollectiveFailed(f"no rank has said {key!r} within {COLLECTIVE_S:g} s")
        time.sleep(POLL_S)
    return store.get(key)


# Ranks tell each other, through the group's store, whether all are ready for what they can only do together.


AGREE_POLL_S = 0.02
READY = b"ready"
FAILED = b"failed"


def all_ready(
    store: Store,
    rank: int,
    world_size: int,
    ready: bool,
    patience_s: float,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Tell the other ranks whether this one is ready, and wait for them. True once all are ready, False if one has
    failed or after `patience_s` seconds. `store` must be fresh. The wait occupies no device, as ranks may load at
    different speeds. An error of `check` ends it."""
    keys = [f"ready/{rank}" for rank in range(world_size)]
    store.set(keys[rank], (READY if ready else FAILED).decode())
    deadline = time.monotonic() + patience_s
    missing = set(keys)
    while ready and missing:
        for key in sorted(missing):
            if store.check([key]):
                missing.remove(key)
                ready = ready and store.get(key) == READY
        if missing and time.monotonic() > deadline:
            return False
        if missing and ready:
            check()
            time.sleep(AGREE_POLL_S)
    return ready
