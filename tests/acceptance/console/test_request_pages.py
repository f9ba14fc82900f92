"""The console shows requests: those that run, one's life, dead letters and history, in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from control import access, keys, requests
from control.clock import now_ms
from control.messages import GenerationRequest, LogEntry, ModelSpec, Sampling
from control.records import catalog
from control.records.api_reports import EndedRequest, note
from control.redis.connection import run, run_every
from control.replicas import health
from control.replicas.lease import Lease, acquire
from control.requests import Emission, Enqueue
from tests.acceptance.console.browser import scrolls_sideways
from tests.acceptance.console.conftest import Visit
from tests.acceptance.console.scripted_farm import ScriptedFarm
from tests.integration.api.conftest import ApiProcess, running_api
from tests.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.timeout(180)

MODEL = "grave"
HOSTILE = "<script>document.title='owned'</script>"
RIGHT_TO_LEFT = "\u202eשלום"
IDLE = "org/large-instruct"
"""A model whose replica beats and claims nothing."""


def enqueue(model: str, rid: str, tenant: str = "acme") -> Enqueue:
    params = GenerationRequest(prompt=list(b"hello"), sampling=Sampling(max_tokens=50))
    return Enqueue(rid=rid, model=model, params=params, tenant=tenant)


@pytest.fixture
def lease(scripted: ScriptedFarm) -> Iterator[Lease]:
    """A model that has no life but what a test writes."""
    client = scripted.client
    catalog.put_spec(client, ModelSpec(name=MODEL, source="s"))
    run(client, catalog.put_replica(MODEL, "r0", catalog.Assigned(revision=1, tp=2)))
    found = run(client, acquire(MODEL, "r0", "alpha/1", 2))
    assert found is not None
    yield found
    for key in client.scan_iter("furrow:{grave}:*"):
        client.delete(key)
    client.srem("furrow:models", MODEL)


@pytest.fixture(scope="module")
def telling_api(scripted: ScriptedFarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    """Started with --console-text."""
    with running_api(scripted.server.url, tmp_path_factory.mktemp("telling"), "--console-text") as process:
        yield process


def row(page: Page, name: str) -> str:
    # By text: the roles of a thousand rows take seconds to compute.
    return page.locator("tbody tr", has_text=name).inner_text()


def test_no_word_of_a_list_is_broken(visit: Visit, scripted: ScriptedFarm) -> None:
    """Where the page is so narrow that long ids take several lines."""
    run(scripted.client, requests.enqueue(enqueue(IDLE, "7c1f3a52b9d04e6e8a10d2f4c6b8e0a1")))
    page = visit("#/requests")
    page.set_viewport_size({"width": 1040, "height": 800})
    page.get_by_role("link", name="7c1f3a52b9d04e6e8a10d2f4c6b8e0a1").wait_for()
    lines = """(name) => {
      const range = document.createRange();
      range.selectNodeContents(document.querySelector(`td[data-name="${name}"]`));
      return new Set([...range.getClientRects()].map(({ top }) => top)).size;
    }"""
    assert page.evaluate(lines, "Request") > 1, "the page is wide enough for all"
    assert page.evaluate(lines, "Priority") == 1
    run(scripted.client, requests.cancel(IDLE, "7c1f3a52b9d04e6e8a10d2f4c6b8e0a1", "acme"))


def test_a_thousand_requests_are_listed_filtered_and_cancelled(visit: Visit, scripted: ScriptedFarm) -> None:
    """With names that are no markup; what ends a request asks first, and the keyboard alone does it."""
    tenants = ("acme", HOSTILE, RIGHT_TO_LEFT)
    calls = [requests.enqueue(enqueue(IDLE, f"one-{number:04}", tenants[number % 3])) for number in range(1_000)]
    run_every(scripted.client, calls)
    page = visit("#/requests")
    page.get_by_text("1,000 requests, oldest first").wait_for()
    assert page.locator("tbody tr").count() == 200
    page.locator(".more-rows button", has_text="Show 800 more").click()
    page.locator("tbody tr").nth(999).wait_for()
    assert HOSTILE in row(page, "one-0001") and "place 2" in row(page, "one-0001")
    page.get_by_label("Filter by id, model, tenant or replica").fill("One-0500")
    page.get_by_text("1 request of 1,000, oldest first").wait_for()
    assert page.get_by_label("Filter by id, model, tenant or replica").input_value() == "One-0500"
    page.get_by_role("button", name="Cancel request one-0500").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Cancel this request?")
    dialog.wait_for()
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert scripted.client.hget(f"furrow:{{{IDLE}}}:req:one-0500", "state") == "queued"
    page.keyboard.press("Enter")  # the focus is back at the button
    dialog.wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text("one-0500: is cancelled.").wait_for()
    page.get_by_text("No request fits this filter.").wait_for()
    assert "owned" not in page.title()
    narrow = visit("#/requests", width=390)
    narrow.locator("tbody tr").nth(199).wait_for()
    assert not scrolls_sideways(narrow)
    page.goto(page.url.partition("#")[0] + "#/requests?tenant=nobody")
    page.get_by_text("No request waits or runs.").wait_for()
    scripted.client.delete(*scripted.client.keys(f"furrow:{{{IDLE}}}:*queue*"), f"furrow:{{{IDLE}}}:load")
    scripted.client.delete(*scripted.client.keys(f"furrow:{{{IDLE}}}:served*"))


def test_a_request_s_life_is_a_timeline_over_its_epochs(visit: Visit, scripted: ScriptedFarm, lease: Lease) -> None:
    """The picture and the list say the same; it grows while the request lives, and stays after the end."""
    client = scripted.client
    run(client, requests.enqueue(enqueue(MODEL, "lived", HOSTILE)))
    run(client, requests.claim(lease, 1, 100))
    run(client, requests.emit(lease, [Emission("lived", 1, [LogEntry(1, 0, 104)], None, {"t_prefill": now_ms()})]))
    assert health.write_poison(client, MODEL, "r0", lease.epoch, 1, "exited", f"rank 1 died {HOSTILE}")
    page = visit("#/requests/chatcmpl-lived", width=390)
    page.get_by_text("ended by exited").wait_for()
    assert page.locator(".timeline circle.fault-mark").count() == 1
    client.delete(lease.keys.lock)
    second = run(client, acquire(MODEL, "r0", "alpha/2", 2))
    assert second is not None
    at = now_ms()
    run(client, health.note_formation(MODEL, "r0", health.Formation(second.epoch, at, at + 1, at + 2, at + 3)))
    run(client, requests.adopt(second))
    page.get_by_text("attempt 2 · r0").wait_for()
    run(client, requests.emit(second, [Emission("lived", 2, [LogEntry(2, 0, 105, "stop")], "finished")]))
    page.locator("h1 + .badge, .title .badge").get_by_text("finished").wait_for()
    phases = page.get_by_role("table", name="Phases").inner_text()
    for name in ("queued", "claimed", "prefill", "first token", "fault: exited", "adopted", "ended", HOSTILE):
        assert name in phases, name
    assert HOSTILE in page.locator("dl.facts").inner_text() and not scrolls_sideways(page)
    assert page.get_by_role("button", name="Cancel request").count() == 0


def test_what_is_not_kept_any_more_is_said(visit: Visit) -> None:
    page = visit("#/requests/none", expected=("404",))
    page.get_by_text("This request is not kept any more, or never was.").wait_for()


def test_texts_are_shown_where_that_was_asked_for(
    visit: Visit, scripted: ScriptedFarm, lease: Lease, telling_api: ApiProcess
) -> None:
    """Without --console-text the page names the option."""
    client = scripted.client
    catalog.put_assets(MODEL, scripted.leader.assets)
    run(client, catalog.put_assets(MODEL, scripted.leader.assets))
    params = GenerationRequest(
        prompt=scripted.leader.tokenizer.encode(HOSTILE, add_special_tokens=False).ids, sampling=Sampling(max_tokens=5)
    )
    run(client, requests.enqueue(Enqueue(rid="told", model=MODEL, params=params, tenant="t")))
    page = visit("#/requests/told", expected=("403",))
    page.get_by_role("button", name="Show prompt and answer").click()
    page.get_by_text("--console-text").wait_for()
    telling = visit("#/requests/told", url=telling_api.url)
    telling.get_by_role("button", name="Show prompt and answer").click()
    telling.locator("pre", has_text=HOSTILE).wait_for()


def test_dead_letters_are_shown_retried_and_dropped(
    visit: Visit, scripted: ScriptedFarm, lease: Lease, telling_api: ApiProcess, tmp_path: Path
) -> None:
    """Each act asks first; a retry leads to the new request's life."""
    client = scripted.client
    for rid in ("crash-1", "crash-2"):
        run(client, requests.enqueue(enqueue(MODEL, rid, HOSTILE)))
        run(client, requests.claim(lease, 1, 100))
        assert run(client, requests.bury(lease, rid, f"crashed alone {HOSTILE}"))
    page = visit("#/dead?model=other", expected=("403",))
    page.get_by_text("No dead letters.").wait_for()
    page.get_by_role("link", name="Show all").click()
    page.get_by_role("link", name="crash-1").click()
    page.get_by_role("button", name="Show prompt and parameters").click()
    page.get_by_text("--console-text").wait_for()
    page.get_by_role("button", name="Drop crash-1").click()
    page.get_by_role("dialog").get_by_role("button", name="Drop").click()
    page.get_by_text("crash-1 is dropped.").wait_for()
    page.get_by_role("link", name="crash-2").wait_for()
    assert page.get_by_role("link", name="crash-1").count() == 0 and HOSTILE in row(page, "crash-2")
    telling = visit(f"#/dead/{MODEL}/crash-2", url=telling_api.url, width=390)
    telling.get_by_role("button", name="Show prompt and parameters").click()
    telling.get_by_text('"max_tokens": 50').wait_for()
    assert not scrolls_sideways(telling)
    telling.get_by_role("button", name="Retry crash-2").click()
    telling.get_by_role("dialog").get_by_role("button", name="Try again").click()
    telling.get_by_role("heading", name="Timeline").wait_for()
    telling.close()  # before the request goes with its model
    page.get_by_text("No dead letters.").wait_for()


def test_the_history_shows_each_epoch_with_its_stages_and_fault(
    visit: Visit, scripted: ScriptedFarm, lease: Lease
) -> None:
    """A new epoch comes into the open page."""
    client, epoch = scripted.client, lease.epoch
    run(
        client, health.note_formation(MODEL, "r0", health.Formation(epoch, epoch, epoch + 20, epoch + 70, epoch + 1070))
    )
    page = visit(f"#/history?model={MODEL}", width=390)
    page.get_by_text("1.1 s").wait_for()
    assert health.write_poison(client, MODEL, "r0", epoch, -1, "deadline", f"a step hangs {HOSTILE}")
    client.delete(lease.keys.lock)
    second = run(client, acquire(MODEL, "r0", "alpha/2", 2))
    assert second is not None
    at = now_ms()
    run(client, health.note_formation(MODEL, "r0", health.Formation(second.epoch, at, at + 1, at + 2, at + 3)))
    page.get_by_text(str(second.epoch)).wait_for()
    assert HOSTILE in page.get_by_role("table", name="Epochs").inner_text() and not scrolls_sideways(page)
    page.get_by_label("Model").select_option(IDLE)
    page.get_by_text("No epoch is known yet.").wait_for()


READ_AT_ONCE = """async (times) => {
  const { api } = await import(new URL("lib/api.js", location));
  await Promise.all(Array.from({ length: times }, () => api.get("/farm/usage?days=400")));
}"""
READ_AFTER_AN_ACT = """async () => {
  const { api } = await import(new URL("lib/api.js", location));
  await api.post("/farm/hosts/drain", { host: "nowhere" }).catch(() => {});
  await api.get("/farm/usage?days=7");
}"""


def test_the_reads_of_pages_are_shared_but_for_those_after_an_act(visit: Visit, scripted: ScriptedFarm) -> None:
    """As the browser sends them: it may add headers that ask the API for an answer of their own."""

    def reads() -> int:
        return scripted.client.info("commandstats")["cmdstat_hgetall"]["calls"]

    page = visit("#/keys", expected=("400",))
    page.get_by_role("heading", name="Usage", exact=True).wait_for()
    one, before = 400 * scripted.client.scard("furrow:models"), reads()
    page.evaluate(READ_AT_ONCE, 20)
    assert one <= reads() - before < 10 * one
    with page.expect_request(lambda request: request.url.endswith("/farm/usage?days=30")) as polled:
        page.reload()
    assert not {"cache-control", "pragma"} & polled.value.all_headers().keys()
    with page.expect_request(lambda request: request.url.endswith("/farm/usage?days=7")) as after:
        page.evaluate(READ_AFTER_AN_ACT)
    assert after.value.all_headers()["cache-control"] == "no-cache"


def test_ended_requests_with_their_causes(visit: Visit, scripted: ScriptedFarm) -> None:
    """Finished and failed ones, the names of keys, filters by end and text, a row that opens the request; 390 px."""
    now = now_ms()
    key, _ = access.mint(name=HOSTILE)
    access.create(scripted.client, key)
    records = [
        EndedRequest(id=f"r{number}", path="/v1/chat/completions", status=200, ended_ms=now + number, total_ms=9)
        for number in range(60)
    ]
    failed = EndedRequest(
        id="bad", path="/v1/x", status=500, ended_ms=now + 99, total_ms=5, model="tiny", key=key.id, error=HOSTILE
    )
    run_every(scripted.client, note([*records, failed]))
    for width in (390, 1440):
        page = visit("#/requests", width=width, dark=width == 390)
        table = page.get_by_role("table", name="Ended requests")
        table.get_by_role("link", name="bad").wait_for()
        page.get_by_text("61 requests, newest first").wait_for()
        row = table.get_by_role("row").filter(has=page.get_by_role("link", name="bad"))
        until(lambda row=row: row.inner_text().count(HOSTILE) == 2, 40)  # the key's name and the cause
        assert "failed: 500" in row.inner_text() and key.id not in row.inner_text()
        page.get_by_role("button", name="Show 11 more").click()
        assert table.get_by_role("link").count() >= 61
        page.get_by_label("Filter ended requests by id").fill("owned")
        page.get_by_text("1 request, newest first").wait_for()
        page.get_by_label("Filter ended requests by id").fill("")
        page.get_by_label("End", exact=True).select_option("finished")
        page.get_by_text("60 requests, newest first").wait_for()
        assert not scrolls_sideways(page)
    scripted.client.delete(keys.ENDED)
