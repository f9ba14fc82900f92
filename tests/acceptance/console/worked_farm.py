"""A farm that has worked, for pictures: requests, a life with a fault, dead letters, keys and their usage."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx

from control import access, requests
from control.clock import now_ms
from control.messages import GenerationRequest, LogEntry, ModelSpec, Sampling
from control.records import catalog
from control.redis.connection import run
from control.replicas import health
from control.replicas.lease import acquire
from control.requests import Emission, Enqueue
from tests.acceptance.console.scripted_farm import ScriptedFarm, populate

if TYPE_CHECKING:
    from playwright.sync_api import Page

WORKED = "org/worked-8b"
LIVED = "7c1f3a52b9d04e6e8a10d2f4c6b8e0a1"
BURIED = ("crash-5b1e", "crash-77a0")


def worked(farm: ScriptedFarm) -> None:
    """Fill it."""
    populate(farm)
    client = farm.client
    catalog.put_spec(client, ModelSpec(name=WORKED, source=WORKED, tp=2))
    run(client, catalog.put_replica(WORKED, "r0", catalog.Assigned(revision=1, tp=2)))
    lease = run(client, acquire(WORKED, "r0", "beta/1", 2))
    assert lease is not None
    for rid in BURIED:
        _enqueue(farm, rid, WORKED)
        run(client, requests.claim(lease, 1, 1_000))
        run(client, requests.bury(lease, rid, "rank 1 ended with signal 11 three times while this request ran alone"))
    _enqueue(farm, LIVED, WORKED)
    run(client, requests.claim(lease, 1, 1_000))
    time.sleep(0.2)
    run(client, requests.emit(lease, [Emission(LIVED, 1, [LogEntry(1, 0, 104)], None, {"t_prefill": now_ms()})]))
    time.sleep(0.5)
    health.write_poison(client, WORKED, "r0", lease.epoch, 1, "exited", "rank 1 ended with signal 9 (SIGKILL)")
    time.sleep(0.3)
    client.delete(lease.keys.lock)
    second = run(client, acquire(WORKED, "r0", "beta/2", 2))
    assert second is not None
    at = second.epoch
    run(client, health.note_formation(WORKED, "r0", health.Formation(at, at, at + 20, at + 70, at + 310)))
    time.sleep(0.4)
    run(client, requests.adopt(second))
    run(client, requests.emit(second, [Emission(LIVED, 2, [LogEntry(2, 0, 105)])]))
    for number in range(5):
        _enqueue(farm, f"waits-{number}", "org/large-instruct", tenant=("acme", "lab", "")[number % 3])


def _enqueue(farm: ScriptedFarm, rid: str, model: str, tenant: str = "acme") -> None:
    params = GenerationRequest(prompt=list(b"hello " * 40), sampling=Sampling(max_tokens=50))
    run(
        farm.client, requests.enqueue(Enqueue(rid=rid, model=model, params=params, tenant=tenant, received_ms=now_ms()))
    )


def use(farm: ScriptedFarm, url: str) -> None:
    """Make keys, one of which is used, and one revoked."""
    operator, _ = access.mint(name="console", admin=True)
    gone, _ = access.mint(name="left the team")
    used, secret = access.mint(name="batch jobs", rpm=60, tpm=200_000, models=["tiny"])
    for key in (operator, gone, used):
        access.create(farm.client, key)
    access.revoke(farm.client, gone)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "How deep is a furrow?"}]}
    headers = {"authorization": f"Bearer {secret}"}
    httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=40).raise_for_status()


def talk(page: Page) -> None:
    """Say something, and let the answer come."""
    message = page.get_by_label("Message", exact=True)
    message.fill("How deep is a furrow?\nAnswer in one sentence.")
    message.press("Enter")
    page.get_by_text("first after").wait_for()
