"""Pictures of every page, in light, dark and narrow: `python -m tests.acceptance.console.shots FOLDER [TEXT…]`.

With TEXT only pages are taken whose name contains one. Each picture is of a scripted farm.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from control import access, requests
from control.clock import now_ms
from control.messages import GenerationRequest, LogEntry, ModelSpec, Sampling
from control.placement.membership import FilesHere, HostFacts, Space, put_facts
from control.records import catalog
from control.redis.connection import run
from control.replicas import health
from control.replicas.lease import acquire
from control.requests import Emission, Enqueue
from tests.acceptance.console.browser import chromium
from tests.acceptance.console.scripted_farm import ScriptedFarm, populate, trouble
from tests.integration.api.conftest import ApiProcess, running_api
from tests.servers import NEW, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FORMS = {"light": (1280, False), "dark": (1280, True), "390": (390, False), "390-dark": (390, True)}
SETTLED_S = 2.5
TOGETHER = 4
"""Pages of one context: each holds a connection, and a browser has six for one server."""

WORKED = "org/worked-8b"
LIVED = "7c1f3a52b9d04e6e8a10d2f4c6b8e0a1"
BURIED = ("crash-5b1e", "crash-77a0")


def press(name: str) -> Callable[[Page], None]:
    """Presses the first button of that name."""
    return lambda page: page.get_by_role("button", name=name).first.click()


def nothing(_: Page) -> None:
    """The page as it is."""


def worked(farm: ScriptedFarm) -> None:
    """A farm that has worked: requests, a life with a fault, dead letters."""
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


GIB = 2**30
FACTS = HostFacts(
    at_ms=0,
    version="1",
    clock_ms=-3,
    round_trip_ms=0.4,
    models=Space(path="/models", total=900 * GIB, free=7 * GIB),
    cache=Space(path="/root/.cache/furrow", total=120 * GIB, free=86 * GIB),
    shared_memory=Space(path="/dev/shm", total=64 * GIB, free=61 * GIB),
    compiler="g++ 14.2.0",
    native="",
    kernels_off=[],
    files={"org/large-instruct": FilesHere(fingerprint="5b1e")},
)
"""Of a host with little space."""

QUIET: dict[str, tuple[str, Callable[[Page], None]]] = {
    "farm": ("#/", nothing),
    "requests": ("#/requests", nothing),
    "dead": ("#/dead", nothing),
    "keys": ("#/keys", nothing),
    "history": ("#/history?model=tiny", nothing),
    "chat": ("#/chat?model=tiny", nothing),
    "lost": ("#/nowhere", nothing),
    "model-unknown": ("#/models/none", nothing),
}
TROUBLED: dict[str, tuple[str, Callable[[Page], None]]] = {
    "farm-trouble": ("#/", nothing),
    "model": ("#/models/org%2Flarge-instruct", nothing),
    "model-slow": ("#/models/slow-8b", nothing),
    "model-failed": ("#/models/org%2Ftoo-large", nothing),
    "model-loading": ("#/models/org%2Fnew-70b", nothing),
    "model-unload": ("#/models/org%2Flarge-instruct", press("Unload…")),
    "model-settings": ("#/models/slow-8b", press("Change settings…")),
    "load": ("#/", press("Load a model…")),
    "host": ("#/hosts/alpha", nothing),
    "host-away": ("#/hosts/gamma", nothing),
}
WORK: dict[str, tuple[str, Callable[[Page], None]]] = {
    "work-requests": ("#/requests", nothing),
    "work-life": (f"#/requests/{LIVED}", nothing),
    "work-dead": ("#/dead", nothing),
    "work-letter": (f"#/dead/{WORKED.replace('/', '%2F')}/{BURIED[0]}", press("Show prompt")),
    "work-keys": ("#/keys", nothing),
    "work-key-limits": ("#/keys", press("Limits of batch jobs")),
    "work-history": (f"#/history?model={WORKED.replace('/', '%2F')}", nothing),
    "work-chat": ("#/chat?model=tiny", talk),
}


@contextmanager
def served(folder: Path, fill: Callable[[ScriptedFarm], None]) -> Generator[tuple[ScriptedFarm, ApiProcess]]:
    with serving(NEW, "appendonly yes") as server:
        farm = ScriptedFarm(server)
        fill(farm)
        farm.start()
        with running_api(server.url, folder) as process:
            yield farm, process
        farm.stop()


def take(
    browser: Browser, url: str, folder: Path, pages: dict[str, tuple[str, Callable[[Page], None]]], wanted: list[str]
) -> None:
    """A picture of each page in each form."""
    chosen = [one for one in pages.items() if not wanted or any(text in one[0] for text in wanted)]
    for form, (width, dark) in FORMS.items():
        for at in range(0, len(chosen), TOGETHER):
            context = browser.new_context(
                viewport={"width": width, "height": 800},
                color_scheme="dark" if dark else "light",
                reduced_motion="reduce",
            )
            opened = [(name, act, context.new_page(), address) for name, (address, act) in chosen[at : at + TOGETHER]]
            for _, _, page, address in opened:
                page.goto(f"{url}/console/{address}")
                page.wait_for_selector("main h1")
            time.sleep(SETTLED_S)
            for name, act, page, _ in opened:
                page.bring_to_front()
                act(page)
                page.screenshot(path=str(folder / f"{name}-{form}.png"), full_page=True)
            context.close()


def main(folder: Path, wanted: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)

    def troubled(farm: ScriptedFarm) -> None:
        populate(farm)
        trouble(farm)
        run(farm.client, put_facts("alpha", FACTS))

    with chromium() as browser, tempfile.TemporaryDirectory() as logs:
        for fill, pages in ((populate, QUIET), (troubled, TROUBLED), (worked, WORK)):
            with served(Path(logs), fill) as (farm, process):
                if fill is worked:
                    use(farm, process.url)
                take(browser, process.url, folder, pages, wanted)
        take_special(browser, folder, Path(logs), wanted)


def take_special(browser: Browser, folder: Path, logs: Path, wanted: list[str]) -> None:
    """A farm without anything, one whose Redis is away, and one that asks for a key."""
    with serving(NEW, "appendonly yes") as server:
        with running_api(server.url, logs) as process:
            take(browser, process.url, folder, {"farm-empty": ("#/", nothing)}, wanted)

            def away(page: Page) -> None:
                server.kill()
                page.get_by_text("Redis does not answer").wait_for()

            def back(_: Page) -> None:
                if server.process is None:
                    server.start()
                away(_)

            take(browser, process.url, folder, {"farm-away": ("#/", back)}, wanted)
            if server.process is None:
                server.start()
        with running_api(server.url, logs, "--keys") as process:
            take(browser, process.url, folder, {"key": ("#/", nothing)}, wanted)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
