"""A farm in the middle of its work, put into Redis by the very functions that put it there in production."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from api.background.heartbeat import Heartbeat
from api.settings import ApiSettings
from control import access, constants, keys, requests
from control.commands import Ping, Pong
from control.messages import Assignment, GenerationRequest, LogEntry, ModelSpec, Sampling, encode
from control.placement import farm, membership
from control.placement.membership import FilesHere, HostFacts, Space, put_facts
from control.placement.placement import Host
from control.records import catalog
from control.records.responses import Quota, StoredResponse, keep_response, watch_response
from control.redis.clients import SyncRedis
from control.redis.connection import connect_async, run, run_all
from control.replicas import health
from control.replicas.commands import reply, send
from control.replicas.lease import Lease, acquire
from control.requests import Emission, Enqueue
from control.version import VERSION
from worker.leader.crash_isolation import CrashRecord

MODEL, HOST, OWNER = "demo", "alpha", "alpha/4711"
WEIGHTS = "0123456789abcdef"
FACTS = HostFacts(
    at_ms=1,
    version=VERSION,
    clock_ms=3,
    round_trip_ms=0.2,
    models=Space(path="/models", total=2**40, free=2**39),
    cache=Space(path="/cache", total=2**40, free=2**39),
    shared_memory=Space(path="/dev/shm", total=2**34, free=2**34),
    compiler="c++: 12.2",
    native="",
    kernels_off=[],
    files={MODEL: FilesHere(fingerprint=WEIGHTS)},
)
FORMATION = health.Formation(epoch=41, led=42, gathered=43, joined=44, loaded=45)


@dataclass
class Populated:
    """`running` has three tokens, `waiting` is acme's next; `left` is followed by nobody; `lease` leads r0."""

    client: SyncRedis
    lease: Lease
    poisoned: Lease
    running: str = "rid-running"
    waiting: str = "rid-waiting"
    dead: str = "rid-dead"
    left: str = "rid-left"
    key: str = ""
    """Id of acme's API key, which `dead` was counted under."""


def populate(client: SyncRedis, url: str) -> Populated:
    """One model, two replicas of which r1 is poisoned, a host, an API process, and requests in every state."""
    spec = ModelSpec(name=MODEL, source="somewhere/demo", tp=2, replicas=2, devices=["cpu", "cpu"])
    catalog.put_spec(client, spec)
    membership.beat_host(client, Host(HOST, ("cuda:0",)), pid=99, memory_bytes=2**30)
    run(client, put_facts(HOST, FACTS))
    assert run(client, farm.hold_placement(HOST))
    farm.assign(client, HOST, Assignment(spec=spec, replica="r0", ranks=[0, 1], devices=["cpu", "cpu"]))
    health.write_status(client, MODEL, "r0", "running", "", host=HOST, tp=2)
    run(client, catalog.put_weights(MODEL, "r0", WEIGHTS))
    lease, poisoned = _lead(client, "r0"), _lead(client, "r1")
    for rank, seq, pending in ((0, 41, 1900), (1, 40, 1800)):
        run(client, health.beat(MODEL, "r0", rank, _beat(lease, seq, pending, 4711 + rank)))
    assert health.write_poison(client, MODEL, "r1", poisoned.epoch, 1, "exited", "rank 1 (pid 12) was killed")
    run(client, health.note_formation(MODEL, "r0", FORMATION))
    send(client, lease, Ping(epoch=lease.epoch, seq=1), 2)
    reply(client, MODEL, "r0", Pong(epoch=lease.epoch, seq=1, rank=1, world_size=2, cuda_device="cpu"))
    key, _ = access.mint(name="acme", tenant="acme", rpm=60)
    access.create(client, key)
    populated = Populated(client, lease, poisoned, key=key.id)
    _fill_queue(populated)
    stored = StoredResponse(
        rid=populated.running,
        owner="acme",
        tenant="acme",
        model=MODEL,
        view="{}",
        previous="rid-0",
        input=[{"id": "i"}],
    )
    run(client, keep_response(stored, 60_000, Quota(1 << 20, 100)))
    run_all(client, watch_response(stored.rid, stored.owner))
    asyncio.run(_api_beats(url))
    # Keys that live for two seconds are made permanent: a test on a busy machine may look later.
    for key in client.scan_iter(f"{keys.PREFIX}*"):
        if 0 < client.pttl(key) <= constants.LOCK_MS:
            client.pexpire(key, 60_000)
    return populated


def _fill_queue(populated: Populated) -> None:
    client, lease = populated.client, populated.lease
    _enqueue(client, populated.dead, "acme", 5, account=populated.key)
    run(client, requests.claim(lease, 1, 1000))
    assert run(client, requests.bury(lease, populated.dead, "crashed its group alone: forward_failed"))
    _enqueue(client, populated.running, "acme", 7)
    run(client, requests.claim(lease, 1, 1000))
    entries = [LogEntry(1, 0, 101), LogEntry(2, 0, 102), LogEntry(3, 0, 103)]
    run(client, requests.emit(lease, [Emission(populated.running, 1, entries, times={"t_prefill": 1234})]))
    record = CrashRecord(crashed_together=[populated.running])
    docket = record.before_step(lease.epoch, {populated.running: 5}, alone=True)
    run(client, requests.note_suspects(lease, encode(docket).decode(), [populated.running], []))
    _enqueue(client, populated.waiting, "acme", 11)
    _enqueue(client, populated.left, "zeta", 13, api="api-1", on_disconnect="600")
    run(client, requests.unfollow(MODEL, populated.left, "api-1"))


def _enqueue(client: SyncRedis, rid: str, tenant: str, prompt: int, **fields: str) -> None:
    params = GenerationRequest(prompt=list(range(prompt)), sampling=Sampling(max_tokens=9))
    enqueue = Enqueue(rid=rid, model=MODEL, params=params, tenant=tenant, received_ms=1000, **fields)
    assert run(client, requests.enqueue(enqueue)).rid == rid


def _lead(client: SyncRedis, replica: str) -> Lease:
    lease = run(client, acquire(MODEL, replica, OWNER, 2))
    assert lease is not None
    return lease


def _beat(lease: Lease, seq: int, pending_ms: int, pid: int) -> health.Beat:
    return health.Beat(
        epoch=lease.epoch,
        seq=seq,
        oldest_pending_ms=pending_ms,
        forward_ms=4_000,
        waited_ms=300,
        device="cpu",
        memory_bytes=2**20,
        phase="ready",
        pid=pid,
        host=HOST,
    )


async def _api_beats(url: str) -> None:
    client = connect_async(url)
    await Heartbeat(client, ApiSettings(redis_url=url, api_id="api-7"))._beat()
    await client.aclose()
