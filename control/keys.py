"""Every Redis key of the farm: builder, type, life time, who writes it and who reads it. The one table.

All keys of one model share the hash tag `{model}`, so that a script never crosses a Cluster slot.
ops/redis-cli.md shows how to read them by hand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from control.errors import RequestError

PREFIX = "furrow:"

GROUP = "leaders"
"""The consumer group on every queue; a consumer is a replica id, stable over epochs."""
CLASSES = ("high", "normal", "low")
"""Priority classes in the order in which they are served."""

_MODEL_NAME = re.compile(r"[^\s{}]{1,200}")
TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_model_name(name: str) -> str:
    """Return `name`, or raise RequestError: braces would break the hash tag, white space every tool."""
    if not _MODEL_NAME.fullmatch(name):
        raise RequestError(
            f"model name {name!r} can't be used: 1 to 200 characters, no white space and no braces", param="model"
        )
    return name


class _HasBase(Protocol):
    @property
    def base(self) -> str: ...


class _Under:
    """A key whose name is fixed, below the `base` of those that it stands among."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, keys: _HasBase, _: type) -> str:
        return keys.base + self._name


@dataclass(frozen=True, slots=True)
class ModelKeys:
    """Keys that belong to one model, whichever replica serves it."""

    model: str

    @property
    def base(self) -> str:
        """`furrow:{model}:`, from which scripts derive keys that they learn only while they run."""
        return f"{PREFIX}{{{self.model}}}:"

    # name                                                 type     written by -> read by             life
    def queue(self, priority: str, tenant: str) -> str:  # stream   enqueue -> claim                  XDEL at the end
        return f"{self.base}queue:{priority}:{tenant}"

    def turns(self, priority: str) -> str:  # zset tenant -> virtual tokens served; enqueue, emit -> claim
        return f"{self.base}turns:{priority}"

    def served(self, priority: str) -> str:  # zset as turns, of all tenants with anything queued or running
        return f"{self.base}served:{priority}"

    def waiting(self, priority: str) -> str:  # zset tenant -> sequences that wait; enqueue, claim -> enqueue
        return f"{self.base}waiting:{priority}"

    def debts(self, priority: str) -> str:  # zset as turns, of tenants with nothing: the last end -> enqueue; 10 min
        return f"{self.base}debts:{priority}"

    deadlines = _Under("deadlines")  # zset rid -> ms at which it expires: enqueue, claim -> expire; while it waits
    load = _Under("load")  # hash, scripts -> api: counts of what waits, rates, and whose turn it is; docs/protocol.md
    bell = _Under("bell")  # stream, capped: enqueue, cancel, drain -> idle leaders

    def request(self, rid: str) -> str:  # hash: scripts -> all; deadline + retention, after the end retention
        return f"{self.base}req:{rid}"

    def log(self, rid: str) -> str:  # stream `<seq>-0`: emit -> api; as the request
        return f"{self.base}log:{rid}"

    def images(self, rid: str) -> str:  # hash `image:piece` -> bytes: stage_image, enqueue -> leader; until its end
        return f"{self.base}images:{rid}"

    image_bytes = _Under("image_bytes")  # hash rid -> `bytes tenant`: stage_image, drops rids without images; 2 days

    def staged(self, rid: str, repair: str) -> str:  # stream as log: repair, enqueue -> the same, renamed; 60 s
        return f"{self.base}staged:{rid}:{repair}"

    def followed(self, api: str) -> str:  # zset of rids that have not ended: enqueue, follow -> unfollow, reap
        return f"{self.base}followed:{api}"

    def events(self, api: str) -> str:  # pub/sub: emit -> api
        return f"{self.base}events:{api}"

    def idempotency(self, tenant: str, key: str) -> str:  # string `rid body-hash`: enqueue; as the request
        return f"{self.base}idem:{tenant}:{key}"

    orphans = _Under("orphans")  # zset rid -> ms at which on_disconnect applies: unfollow, reap -> reap
    dead = _Under("dead")  # stream, capped: bury -> operator
    breaches = _Under("breaches")  # hash file -> JSON of its latest Breach: apis -> operator; 1 h after the last
    docket = _Under("docket")  # hash replica, or heir/replica -> JSON docket: leaders -> leaders; until all got on
    trial = _Under("trial")  # string replica: the one that tries suspects of others: inherit, suspect; 60 s
    spec = _Under("spec")  # hash: operator -> agents; until the model is unloaded
    replicas = _Under("replicas")  # hash replica -> JSON revision, tp: placement, agents -> all; until it is retired
    weights = _Under("weights")  # hash replica -> fingerprint of its weights: leader -> claim; until it is retired
    backends = _Under("backends")  # hash replica -> JSON Backend: leader -> api; until it is retired
    call = _Under("call")  # string: api -> placement, which wakes the model; 30 s
    demand = _Under("demand")  # string JSON Demand: placement -> all; until the model is unloaded
    assets = _Under("assets")  # hash: leader -> api (tokenizer, template, generation config, context length)
    assets_left = _Under("assets:left")  # hash: those of a model that was unloaded; ASSETS_LEFT_MS

    def usage(self, day: int) -> str:  # hash `key:kind` -> count, per day since 1970: every end -> operator; 400 days
        return f"{self.base}usage:{day}"

    settlements = _Under("settlements")  # stream: every end, emit -> apis, which apply and delete them; 1 day

    def replica(self, replica: str) -> ReplicaKeys:
        return ReplicaKeys(self.model, replica)


@dataclass(frozen=True, slots=True)
class ReplicaKeys:
    """Keys that belong to one running copy of a model."""

    model: str
    replica: str

    @property
    def base(self) -> str:
        return f"{PREFIX}{{{self.model}}}:{self.replica}:"

    lock = _Under("lock")  # string `owner:epoch`: acquire, renew -> every script of the leader; 2 s
    server = _Under("server")  # string run id of the server that gave the lock: acquire, renew -> renew; 60 s
    epoch = _Under("epoch")  # string: acquire -> ranks; no TTL

    def commands(self, epoch: int, rank: int) -> str:  # stream `<seq>-0`, capped: leader -> rank; 60 s
        return f"{self.base}cmd:{epoch}:{rank}"

    def replies(self, epoch: int) -> str:  # stream, capped: rank -> leader; 60 s
        return f"{self.base}reply:{epoch}"

    def meeting(self, epoch: int, name: str) -> str:  # string, JSON or words: rank -> ranks, forming a group; 3 min
        return f"{self.base}meeting:{epoch}:{name}"

    def heartbeat(self, rank: int) -> str:  # hash: rank -> agents, api, operator; 1.5 s
        return f"{self.base}hb:{rank}"

    claim = _Under("claim")  # string `call rid ...`: claim -> claim, so that a repeat hands out the same; 60 s
    running = _Under("running")  # zset `rid class entry tenant`, by rid: claim -> adoption, takeover, retire
    poison = _Under("poison")  # hash epoch, rank, kind, message: first to notice -> all; until the next epoch
    poisons = _Under("poisons")  # stream, capped: the history of poison; also wakes blocked leaders and ranks
    epochs = _Under("epochs")  # stream, capped: leader -> operator; when each epoch was led, gathered, joined, loaded
    ends = _Under("ends")  # hash rank -> JSON host, pid, message: a rank that exits with an error -> its agent; 1 h
    status = _Under("status")  # hash: the agent's view (state, detail, host, attempts) -> api, operator; no TTL


@dataclass(frozen=True, slots=True)
class KeyKeys:
    """Keys that belong to one API key; they share a slot of their own, which is no model's."""

    key_id: str

    @property
    def record(self) -> str:  # hash: operator -> apis; until 90 days after it is revoked
        return f"{PREFIX}key:{{{self.key_id}}}"

    @property
    def used(self) -> str:  # string, Unix seconds: apis, once a minute -> operator; 400 days
        return f"{self.record}:used"

    @property
    def bucket(self) -> str:  # hash requests, tokens, at: spend, settle -> the same; until it is full again
        return f"{self.record}:bucket"

    @property
    def open(self) -> str:  # hash hold -> `ms model`, of a key with max_concurrent: spend -> settle; 1 day
        return f"{self.record}:open"

    def spent(self, hold: str) -> str:  # hash request id -> tokens charged: spend -> settle; 1 day
        return f"{self.record}:spent:{hold}"


@dataclass(frozen=True, slots=True)
class ResponseKeys:
    """Keys of the stored responses that share one quota; they share a slot, which is no model's."""

    owner: str

    @property
    def base(self) -> str:
        return f"{PREFIX}responses:{{{self.owner}}}:"

    index = _Under("index")  # zset rid -> ms at which it lapses: apis; as the last record
    sizes = _Under("sizes")  # hash rid -> bytes, and their sum as `total`: apis; as the last record
    chats = _Under("chats")  # zset rid of a stored chat completion -> ms of its creation: apis; as the last record

    def record(self, rid: str) -> str:  # hash of a StoredResponse: apis; --response-ttl
        return f"{self.base}record:{rid}"


API_KEYS = f"{PREFIX}keys"  # set of ids of API keys: operator -> all
API_KEYS_VERSION = f"{PREFIX}keys:version"  # string, counts changes of any API key: operator -> apis
METERED = f"{PREFIX}metered"  # set of names of all models ever loaded: operator -> operator (usage)
MODELS = f"{PREFIX}models"  # set of model names: operator -> all
MODELS_VERSION = f"{PREFIX}models:version"  # counter: each change of a specification -> the agent that plans
TENANT_TURNS = f"{PREFIX}placement:tenants"  # stream tenant, evicted: the agent that plans -> its successor; a minute
ON_DEMAND = f"{PREFIX}placement:on_demand"  # string: the agent that plans -> agents; 60 s after a model on demand
PLACEMENT_LOCK = f"{PREFIX}placement:lock"  # string host: agents, and moves of replicas; 2 s
REAPER_LOCK = f"{PREFIX}reaper:lock"  # string: the api that makes this second's round of reaping; 0.9 s
OVERVIEWS_LOCK = f"{PREFIX}overviews:lock"  # string: the api that reads all overviews in this second; 0.9 s
OVERVIEWS = f"{PREFIX}overviews"  # string, JSON: the api that read them -> all apis; 3 s
DRAINED = f"{PREFIX}drained"  # set of host ids: operator -> placement; until the drain is undone
NEEDS = f"{PREFIX}needs"  # hash model -> JSON of the memory that its ranks need: agents -> placement
HOSTS = f"{PREFIX}hosts"  # set of host ids ever seen: agents -> placement
API_RECORDS = (
    f"{PREFIX}apis:records"  # hash api id -> JSON ApiRecord, until an orderly stop or for an hour: apis -> operator
)
APIS = f"{PREFIX}apis"  # set of api ids ever seen: apis -> operator


OPEN_CHATS = f"{PREFIX}chats:open"  # zset as `responses:open`, of stored chat completions: apis
OPEN_RESPONSES = f"{PREFIX}responses:open"  # zset `rid owner` -> ms at which somebody looks whether it ended: apis
PLOTS = f"{PREFIX}plots"  # stream, capped, of PlotSamples: apis -> operator; an hour after the last one
PLOTS_LOCK = f"{PREFIX}plots:lock"  # string: the api that writes this moment's sample; 9 s
ENDED = f"{PREFIX}ended"  # stream, capped, of EndedRequests: apis -> operator; an hour after the last one
SEAL = f"{PREFIX}seal"  # string, 64 random bytes in hex: the first api that seals a text -> apis; no TTL
RESPONSE_OWNERS = f"{PREFIX}responses:owners"  # zset owner -> ms at which its stored responses are trimmed: apis
RESPONSE_BYTES = f"{PREFIX}responses:bytes"  # zset owner -> bytes that it stores, at its last trim: apis -> operator


def host(host_id: str) -> str:
    """hash version, devices, memory, pid, standby: agent -> placement, operator; 2 s."""
    return f"{PREFIX}host:{host_id}"


def host_facts(host_id: str) -> str:
    """string, JSON HostFacts: agent -> operator; 90 s."""
    return f"{PREFIX}host:{host_id}:facts"


def assignments(host_id: str) -> str:
    """hash `model replica` -> JSON Assignment: placement -> agent; no TTL."""
    return f"{PREFIX}host:{host_id}:assignments"


def memory_deaths(host_id: str) -> str:
    """stream, capped: agent -> agent, operator; deaths of ranks for lack of memory; 10 min."""
    return f"{PREFIX}host:{host_id}:deaths"


def host_loads(host_id: str) -> str:
    """hash `model replica` -> `revision ms`: agent -> agent; until the host has the replica no more."""
    return f"{PREFIX}host:{host_id}:loads"


def api(api_id: str) -> str:
    """hash url, version, started: api -> operator, orphan policy; 2 s."""
    return f"{PREFIX}api:{api_id}"
