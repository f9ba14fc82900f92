"""One valid call of every script, made by the functions that make them in earnest, on a farm where each finds work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from control import access, requests
from control.access import settle, spend
from control.commands import Ping, Pong
from control.keys import ModelKeys
from control.messages import GenerationRequest, LogEntry, ModelSpec, Sampling
from control.placement.farm import hold_placement
from control.records import catalog, responses
from control.records.responses import Quota, StoredResponse
from control.redis.connection import Call
from control.replicas import health
from control.replicas.commands import fan_out
from control.replicas.lease import Lease, acquire, close_epoch, release, renew
from control.requests import Emission
from tests.byte_model import byte_assets
from tests.contract.conftest import MODEL, Farm, last, token

KEY, _ = access.mint(rpm=10, tpm=1000, max_concurrent=3)
QUOTA = Quota(100_000, 10)
SPEC = ModelSpec(name=MODEL, source="x")
STORED = StoredResponse(rid="s1", owner="o", tenant="t", model=MODEL, view="{}", previous="", input=[])
CHAT = replace(STORED, rid="c1", kind="chat", metadata="{}")
KEYS = ModelKeys(MODEL)
PONG = Pong(epoch=1, seq=1, rank=1, world_size=3, cuda_device="cpu")


COUNTS = (1, 3, 0, 1, 0, 0, 1, 0)
END = '0,null,"stop","token"]'


class Scene:
    """A model of which `run` runs under `lease` with one token, `wait` waits, `gone` was left by replica r1, which has
    no leader, and nobody comes for `late`; and there is one of everything else."""

    def __init__(self, farm: Farm) -> None:
        farm.client.flushdb()
        self.farm = farm
        self.prepare()
        self.lease: Lease = farm.lead(world_size=3)
        other = farm.lead("r1", "two")
        farm.put("gone")
        farm.claim(other, 1)
        farm.lose(other)
        farm.put("run", api="a1")
        farm.claim(self.lease, 1)
        farm.emit(self.lease, Emission("run", 1, [token(1)]))
        farm.put("wait", api="a1", on_disconnect="5")
        farm.put("late", tenant="u", deadline_ms=1)
        farm.client.zadd(KEYS.orphans, {"late": 1})
        calls: list[Call[Any]] = [
            spend(KEY, "spent", MODEL, {"spent": 10}),
            *responses.watch_response("s1", "o"),
            responses.keep_response(STORED, 60_000, QUOTA),
            responses.keep_response(CHAT, 60_000, QUOTA),
            responses.end_response("c1", "o", b"{}", 60_000, QUOTA),
            responses.keep_response(replace(CHAT, rid="c2", params=b"{}"), 60_000, QUOTA),
            *responses.list_chat("c1", "o", 5, 60_000, 10),
            put_spec(SPEC),
            catalog.put_assets(MODEL, byte_assets()),
            beat(self.lease.epoch),
            CALLS["stage"](self),
        ]
        for call in calls:
            farm.run(call)
        for key in farm.client.keys("*"):
            if farm.client.ttl(key) > 0:
                farm.client.expire(key, 1000)  # nothing lapses while a test looks at it

    def prepare(self) -> None:
        """The state before all calls."""


def put_spec(spec: ModelSpec) -> Call[int]:
    fields = {name: value for name, value in catalog.as_fields(spec).items() if name != "revision"}
    words = [word for pair in fields.items() for word in pair]
    return Call("put_spec", (ModelKeys(spec.name).spec,), ("change", 1, *words), int)


def beat(epoch: int) -> Call[None]:
    word = health.Beat(
        epoch=epoch, seq=1, oldest_pending_ms=0, device="cpu", memory_bytes=0, phase="ready", pid=1, host="h"
    )
    return health.beat(MODEL, "r0", 0, word)


def emission(lease: Lease) -> Call[Any]:
    rows = [
        Emission("run", 2, [token(2), LogEntry(3, 0, 8, logprobs=None)], times={"t_prefill": 5}),
        Emission("gone", 1, [last(1)], "finished"),
    ]
    return requests.emit(lease, rows)


def enqueued() -> Call[Any]:
    """A request of two choices under an idempotency key."""
    params = GenerationRequest(prompt=[1, 2, 3], sampling=Sampling(max_tokens=9, n=2))
    return requests.enqueue(
        requests.Enqueue(rid="new", model=MODEL, params=params, tenant="t", idempotency_key="k", body_hash="h")
    )


def retire() -> Call[Any]:
    keys = KEYS.replica("r1")
    return plain(
        "retire", (keys.lock, keys.epoch, KEYS.replicas, KEYS.weights, KEYS.backends), KEYS.base, keys.base, "r1", "r0"
    )


def repair(how: str, *words: Any) -> Call[Any]:
    keys = (KEYS.request("run"), KEYS.log("run"), *((KEYS.base + "staged",) if how == "replace" else ()))
    return plain(f"repair_{how}", keys, KEYS.base, "run", "t", *words)


def plain(script: str, keys: tuple[str, ...], *words: Any) -> Call[Any]:
    return Call(script, keys, words, lambda reply: reply)


CALLS: dict[str, Callable[[Scene], Call[Any]]] = {
    "abandon": lambda s: plain("abandon", (KEYS.request("wait"),), KEYS.base, "wait", "gone", "finished"),
    "acquire": lambda s: acquire(MODEL, "r1", "three", 2, 1),
    "adopt": lambda s: requests.adopt(s.lease),
    "beat": lambda s: beat(s.lease.epoch),
    "bury": lambda s: requests.bury(s.lease, "run", "it crashed alone"),
    "cancel": lambda s: requests.cancel(MODEL, "wait", "t"),
    "chain_of_response": lambda s: responses.ancestors("s1", "o"),
    "chats_page": lambda s: responses.chats_page("o", 0, newest_first=True),
    "claim": lambda s: requests.claim(s.lease, 9, 10_000),
    "close_epoch": lambda s: close_epoch(Lease(MODEL, "r1", "two", 2**41, "")),
    "drop_response": lambda s: responses.drop_response("s1", "o")[0],
    "due_responses": lambda s: responses.due_responses(9),
    "emit": lambda s: emission(s.lease),
    "end_response": lambda s: responses.end_response("c2", "o", b"{}", 60_000, QUOTA, b"[]"),
    "enqueue": lambda s: enqueued(),
    "expire": lambda s: requests.expire(MODEL),
    "fan_out": lambda s: fan_out(s.lease, Ping(epoch=s.lease.epoch, seq=1), 3),
    "follow": lambda s: requests.follow(MODEL, "run", "a2", "t", 0, True),
    "hold": lambda s: hold_placement("h"),
    "inherit": lambda s: requests.inherit(s.lease, "r1"),
    "keep_response": lambda s: responses.keep_response(replace(STORED, rid="s2"), 60_000, QUOTA),
    "places": lambda s: requests.places(MODEL, "a1", ["wait", "run"]),
    "poison": lambda s: health.poison(MODEL, "r0", s.lease.epoch, -1, "hang", "it hangs"),
    "position": lambda s: requests.position(MODEL, "wait"),
    "put_assets": lambda s: catalog.put_assets(MODEL, byte_assets(context_length=64)),
    "put_spec": lambda s: put_spec(msgspec.structs.replace(SPEC, tp=2)),
    "reap": lambda s: requests.reap(MODEL, ["a1"]),
    "recount": lambda s: plain("recount", (KEYS.load,), KEYS.base, 4, 2, 0, *COUNTS, "normal t", 1, "low x", 0),
    "relabel_chat": lambda s: responses.relabel_chat("c1", "o", '{"a":"b"}'),
    "release": lambda s: release(s.lease),
    "renew": lambda s: renew(s.lease, 3),
    "repair_append": lambda s: repair("append", 1, 0, "", "", "[2,0,5]"),
    "repair_replace": lambda s: repair("replace", "a1", "once", "running", 1, 2, 0, "", "", 0, END),
    "reply": lambda s: plain("reply", (s.lease.keys.replies(s.lease.epoch),), msgspec.json.encode(PONG)),
    "requeue": lambda s: requests.requeue(s.lease, "run"),
    "retire": lambda s: retire(),
    "settle": lambda s: settle(KEY.id, "spent", "spent", 500),
    "spend": lambda s: spend(KEY, "more", MODEL, {"more": 10, "else": 5}),
    "stage_image": lambda s: requests.stage_images(MODEL, "more", [[b"AAAA"]], "t", requests.ImageBounds(9, 9))[0],
    "stage": lambda s: plain("stage", (KEYS.base + "staged",), 1, "[1,0,5]", "[2,0,6]"),
    "suspect": lambda s: requests.note_suspects(s.lease, "{}", ["run"], ["gone"]),
    "takeover": lambda s: requests.takeover(s.lease, "r1"),
    "tombstone": lambda s: plain("tombstone", (KEYS.spec,)),
    "trim_responses": lambda s: responses.trim_responses("o", Quota(0, 0)),
    "unfollow": lambda s: requests.unfollow(MODEL, "wait", "a1", 5, 0),
    "use_responses": lambda s: responses.use_responses(["s1"], "o", 90_000)[0],
    "write": lambda s: plain("write", (KEYS.replica("r0").status,), "HSET", "state", "serving"),
    "waiting_page": lambda s: plain("waiting_page", (KEYS.queue("normal", "t"),), "", 9),
    "watch_response": lambda s: responses.watch_response("s3", "o")[0],
}
