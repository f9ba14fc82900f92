"""The scene of calls.py among many of everything that a script could walk, and calls of each script that meet them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from control import constants, keys, requests
from control.access import settle, spend
from control.keys import KeyKeys, ResponseKeys
from control.messages import GenerationRequest, LogEntry, RequestState, Sampling
from control.records import responses
from control.redis.connection import Call
from control.replicas.lease import Lease
from control.requests import Emission, Enqueue
from tests.contract.calls import CALLS, END, KEY, KEYS, QUOTA, STORED, Scene, plain, repair
from tests.contract.conftest import MODEL, Farm, last, token

Make = Callable[[Any], Call[Any]]

WAITS_A_WHILE = 600_000
OWNER = ResponseKeys("o")
R1_KEYS = (KEYS.replica("r1").lock, KEYS.replica("r1").epoch, KEYS.replicas, KEYS.weights, KEYS.backends)


class Crowd(Scene):
    """`size` requests that run under r0, that r1 left, that wait in one queue, and that wait with a tenant of their own
    each; logs, orphans, stored responses, settlements, replicas, dockets and API processes as many."""

    def __init__(self, farm: Farm, size: int) -> None:
        self.size = size
        super().__init__(farm)
        self.run_on()
        for index in range(size):
            farm.put(f"deep-{index}", api="a1", on_disconnect="0")
            farm.put(f"wait-{index}", tenant=f"w{index}", api=f"api-{index}", priority="low")
        self.fill()

    def prepare(self) -> None:
        """Requests that two leaders have claimed."""
        for replica, owner, names in (("r0", "one", "run"), ("r1", "two", "left")):
            lease = self.farm.lead(replica, owner, world_size=3)
            self.farm.client.pexpire(lease.keys.lock, WAITS_A_WHILE)
            for index in range(self.size):
                self.farm.put(f"{names}-{index}", tenant=f"{names}{index}", api=f"api-{index}")
            self.farm.claim(lease, self.size, 10**9)
        self.farm.lose(lease)

    def run_on(self) -> None:
        """A running, a waiting and a staged log of `size` entries."""
        entries = [token(seq) for seq in range(2, self.size + 1)]
        self.farm.emit(self.lease, Emission("run", 2, entries))
        self.farm.client.pexpire(self.lease.keys.lock, WAITS_A_WHILE)
        self.farm.put("long", n=2, api="a1", delivered=[token(1), *entries], deadline_ms=WAITS_A_WHILE)
        texts = [f"[{seq},0,5]" for seq in range(1, self.size + 1)]
        self.farm.client.delete(KEYS.base + "staged")
        self.farm.run(plain("stage", (KEYS.base + "staged",), 1, *texts))

    def fill(self) -> None:
        """Collections that many calls would fill, as those leave them."""
        client, numbers = self.farm.client, range(self.size)
        each = {f"x{index}": str(index) for index in numbers}
        client.hset(KEYS.replicas, mapping=dict.fromkeys(each, '{"revision":1,"tp":1}'))
        client.hset(KEYS.weights, mapping={name: f"weights-{name}" for name in each})
        client.hset(KEYS.docket, mapping=dict.fromkeys(each, "{}") | {"r1": '{"guilty":["left-1"]}'})
        client.hset(KEYS.replica("r1").status, "state", "failed")
        for replica in ("r0", "r1"):
            for _ in numbers:
                client.xadd(KEYS.replica(replica).poisons, {"epoch": 1}, maxlen=constants.POISONS_LENGTH)
        for name in keys.CLASSES:
            client.zadd(KEYS.debts(name), {one: index for index, one in enumerate(each)})
            client.hset(KEYS.load, f"turn:{name}", 10**9)
        for overdue in (KEYS.orphans, KEYS.deadlines):
            client.zadd(overdue, {f"deep-{index}": 1 for index in numbers})
        client.sadd(keys.APIS, *each)
        client.hset(KeyKeys(KEY.id).open, mapping=dict.fromkeys(each, "1 m"))
        client.hset(KeyKeys(KEY.id).spent("spent"), mapping=dict.fromkeys(each, 5))
        client.zadd(keys.OPEN_RESPONSES, {f"{one} o": 1 for one in each})
        for index in numbers:
            client.hset(OWNER.record(f"s{index + 1}"), mapping={"previous": f"s{index + 2}", "tenant": "t", "view": ""})
            client.xadd(KEYS.settlements, {"key": "k"})
            client.xadd(KEYS.dead, {"rid": "x"})
        client.hset(OWNER.sizes, mapping={f"s{index + 1}": 600 for index in numbers} | {"total": 600 * self.size})
        client.zadd(OWNER.chats, {f"s{index + 1}": index for index in numbers})
        client.zadd(OWNER.index, {f"s{index + 1}": 10**15 + index for index in numbers})

    def began_elsewhere(self) -> None:
        """All requests have a token, which came from the weights of another replica."""
        for name in ("run", "left", "deep", "wait"):
            for index in range(self.size):
                self.farm.client.hset(KEYS.request(f"{name}-{index}"), mapping={"weights": "weights-x0", "seq": 1})


def of_a_stranger(make: Callable[[Lease], Call[Any]]) -> Make:
    """The call of a leader whose weights are others than those with which all requests began."""

    def made(scene: Crowd) -> Call[Any]:
        scene.began_elsewhere()
        return make(replace(scene.lease, weights="mine"))

    return made


def recount(scene: Crowd) -> Call[Any]:
    """A count that no change of the queue has overtaken."""
    changes = [int(value or 0) for value in scene.farm.client.hmget(KEYS.load, "enqueued", "claimed", "moved")]
    return plain("recount", (KEYS.load,), KEYS.base, *changes, *[1] * 8, "normal t", 1, "low w0", 0)


def emit(scene: Crowd, done: RequestState | None) -> Call[Any]:
    """The next token of the request whose log is long."""
    seq = scene.size + 1
    entry = last(seq) if done else LogEntry(seq, 0, 7)
    return requests.emit(scene.lease, [Emission("run", seq, [entry], done)])


def enqueue(tenant: str) -> Call[Any]:
    params = GenerationRequest(prompt=[1, 2, 3], sampling=Sampling(max_tokens=9, n=2))
    return requests.enqueue(Enqueue(rid="new", model=MODEL, params=params, tenant=tenant, api="a1"))


def abandon(rid: str) -> Make:
    return lambda _: plain("abandon", (KEYS.request(rid),), KEYS.base, rid, "gone", "finished")


def suspect(scene: Crowd) -> Call[Any]:
    """It inherited two dockets, among those of all the others."""
    scene.farm.client.hset(KEYS.docket, mapping={"r0/a": "{}", "r0/b": "{}"})
    return requests.note_suspects(scene.lease, "{}", ["run"], ["gone"])


def with_limits(scene: Crowd) -> Call[Any]:
    key = msgspec.structs.replace(KEY, max_concurrent=10**6)
    return spend(key, "more", MODEL, {"more": 10, "else": 5})


OWN: dict[str, dict[str, Make]] = {
    "abandon": {"a long log": abandon("long"), "a running one": abandon("left-1")},
    "adopt": {"its own": CALLS["adopt"], "of other weights": of_a_stranger(requests.adopt)},
    "cancel": {
        "a long log": lambda s: requests.cancel(MODEL, "long", "t"),
        "a running one": lambda s: requests.cancel(MODEL, "run", "t"),
    },
    "claim": {
        "all": lambda s: requests.claim(s.lease, 10**6, 10**9),
        "of other weights": of_a_stranger(lambda lease: requests.claim(lease, 10**6, 10**9)),
        "guests": lambda s: requests.claim(s.lease, 0, 10**9, guests=9, sated=["normal t"]),
    },
    "emit": {"a token": lambda s: emit(s, None), "the end": lambda s: emit(s, "finished")},
    "enqueue": {"a known tenant": lambda s: enqueue("t"), "a new tenant": lambda s: enqueue("new")},
    "follow": {"a page": lambda s: requests.follow(MODEL, "run", "a2", "t", 0, True, most=10)},
    "keep_response": {"beside many": lambda _: responses.keep_response(replace(STORED, rid="new"), 60_000, QUOTA)},
    "recount": {"two tenants": recount},
    "repair_append": {"a long log": lambda s: repair("append", s.size, 0, "", "", f"[{s.size + 1},0,5]")},
    "repair_replace": {
        "a long log": lambda s: repair("replace", "a1", "once", "running", s.size, s.size, 0, "", "", 0, END)
    },
    "retire": {
        "nobody inherits": lambda _: plain("retire", R1_KEYS, KEYS.base, KEYS.replica("r1").base, "r1", ""),
    },
    "settle": {"of many": lambda s: settle(KEY.id, "spent", "spent", 500)},
    "spend": {"beside many": with_limits},
    "stage_image": {"beside others": CALLS["stage_image"]},
    "stage": {"a long log": lambda s: plain("stage", (KEYS.base + "staged",), s.size + 1, f"[{s.size + 1},0,5]")},
    "suspect": {"two inherited": suspect},
    "takeover": {
        "of one that is gone": CALLS["takeover"],
        "of other weights": of_a_stranger(lambda lease: requests.takeover(lease, "r1")),
    },
    "unfollow": {"a long log": lambda s: requests.unfollow(MODEL, "long", "a1", 5, 0)},
}
"""Scripts whose call of calls.py does not meet what there is many of, or not in each of its ways."""

CASES: dict[tuple[str, str], Make] = {
    (script, how): make for script in CALLS for how, make in OWN.get(script, {"": CALLS[script]}).items()
}
"""By script and what the call is about."""
