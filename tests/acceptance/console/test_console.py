"""Every act of the console changes the farm: in a browser, on a scripted farm; names are text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest

from control import keys
from control.clock import now_ms
from control.messages import ModelSpec
from control.operations import desired
from control.operations.plots import FARM, PlotSample, Point, keep
from control.placement import farm, membership
from control.records import catalog
from control.records.api_reports import EndedRequest, note
from control.redis.connection import run_every
from control.replicas import health
from tests.acceptance.console.browser import scrolls_sideways
from tests.acceptance.console.conftest import Visit
from tests.acceptance.console.scripted_farm import ScriptedFarm, ScriptedReplica
from tests.integration.api.conftest import ApiProcess
from tests.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.timeout(180)

LARGE = "#/models/org%2Flarge-instruct"
PAGES = (
    *("#/", LARGE, "#/hosts/alpha", "#/models/none", "#/hosts/none", "#/nowhere"),
    *("#/requests", "#/dead", "#/keys", "#/history?model=tiny", "#/chat?model=tiny"),
)
HOSTILE = "<script>document.title='owned'</script><img/src=x/onerror=document.title='owned'>"


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).first.click()


def dialog(page: Page) -> Locator:
    return page.get_by_role("dialog")


def confirm(page: Page, name: str) -> None:
    dialog(page).get_by_role("button", name=name, exact=True).click()
    dialog(page).wait_for(state="detached")


def test_the_farm_is_shown_and_every_finding_has_its_act(visit: Visit, scripted: ScriptedFarm) -> None:
    """Models, hosts, processes and rates, then what needs an operator, mended from the same page."""
    page = visit()
    page.get_by_text("All is well").wait_for()
    row = page.get_by_role("table", name="Models").get_by_role("row").filter(has_text="org/large-instruct")
    until(lambda: any(3 <= float(text) < 900 for text in row.locator("td.right").all_inner_texts()[:1] if text != "–"))
    assert {"r0", "loaded", "alpha", "4 ready"} <= set(row.locator("td").all_inner_texts())
    assert page.locator(".plot path.line").count() >= 2
    desired.pause(scripted.client, "tiny", paused=True)
    page.get_by_role("link", name="tiny is paused").wait_for()
    press(page, "Resume")
    until(lambda: not scripted.spec("tiny").paused)
    membership.drain(scripted.client, "beta")
    page.get_by_role("link", name="beta is drained").wait_for()
    press(page, "Take back")
    until(lambda: "beta" not in membership.drained_hosts(scripted.client))
    failing = ScriptedReplica(ModelSpec(name="org/ill", source="org/ill"), "beta", failure="CUDA out of memory")
    scripted.add(failing)
    try:
        page.locator(".findings li").filter(has_text="CUDA out of memory").wait_for()
        press(page, "Try again…")
        confirm(page, "Restart replicas")
        until(lambda: scripted.spec("org/ill").revision == 2)
        health.write_status(scripted.client, "org/ill", "r0", "unplaceable", "no host has room", host="", tp=1)
        finding = page.locator(".findings li").filter(has_text="org/ill r0 has no host")
        finding.wait_for()
        assert finding.get_by_role("button").count() == 0
    finally:
        scripted.remove(failing)
    page.get_by_text("All is well").wait_for()


@pytest.mark.parametrize("how", ["stuck", "waits"])
def test_a_slow_rank_is_marked_and_restarted(visit: Visit, scripted: ScriptedFarm, how: str) -> None:
    """The rank that gets on while the other one waits for it: marked on both pages."""
    replica = scripted.add(ScriptedReplica(ModelSpec(name="slow", source="slow", tp=2), "beta", **{how: {0}}))
    try:
        page = visit()
        page.locator(".findings li").filter(has_text="Rank 1 on cuda:1 of beta holds up the others.").wait_for()
        page.get_by_role("link", name="slow r0 has a slow rank").click()
        row = page.get_by_role("table", name="Ranks of r0").get_by_role("row")
        row.nth(2).get_by_text("slow").wait_for()
        assert row.nth(1).get_by_text("ready").is_visible()
    finally:
        scripted.remove(replica)


def test_a_model_is_paused_scaled_restarted_changed_and_unloaded(visit: Visit, scripted: ScriptedFarm) -> None:
    """An act that ends something asks first, and does nothing where it is not confirmed."""
    name = "org/steered"
    replica = scripted.add(ScriptedReplica(ModelSpec(name=name, source=name, tp=2), "beta"))
    page = visit("#/models/org%2Fsteered", expected=("/farm/models/spec",))  # 404 once it is unloaded
    ranks = page.get_by_role("table", name="Ranks of r0")
    ranks.get_by_text("ready").first.wait_for()
    assert ranks.get_by_role("row").count() == 3
    press(page, "Pause")
    page.get_by_text(f"{name}: paused.").wait_for()
    assert scripted.spec(name).paused
    press(page, "Resume")
    until(lambda: not scripted.spec(name).paused)
    press(page, "Scale…")
    dialog(page).get_by_label("Replicas").fill("2")
    confirm(page, "Scale")
    assert scripted.spec(name).replicas == 2
    press(page, "Restart replicas…")
    confirm(page, "Cancel")
    assert scripted.spec(name).revision == 1
    press(page, "Restart replicas…")
    confirm(page, "Restart replicas")
    until(lambda: scripted.spec(name).revision == 2)
    press(page, "Restart replica r0")
    confirm(page, "Restart replica")
    until(lambda: any(one.withdrawn for one in farm.assignments(scripted.client, "beta")))
    press(page, "Change settings…")
    dialog(page).get_by_text("More settings").click()
    dialog(page).get_by_label("Longest context").fill("4")
    dialog(page).get_by_role("button", name="Change settings").click()
    assert not dialog(page).get_by_label("Longest context").evaluate("input => input.checkValidity()")
    dialog(page).get_by_label("Longest context").fill("4096")
    confirm(page, "Change settings")
    spec = scripted.spec(name)
    assert (spec.max_context, spec.tp, spec.source, spec.replicas, spec.revision) == (4096, 2, name, 2, 3)
    page.get_by_text("4,096 tokens").wait_for()
    press(page, "Change settings…")
    dialog(page).get_by_label("Drain time").evaluate("input => (input.value = 17)")  # it raises no revision
    confirm(page, "Change settings")
    page.get_by_text("17.0 s", exact=True).wait_for()
    press(page, "Unload…")
    page.keyboard.press("Escape")
    dialog(page).wait_for(state="detached")
    assert not scripted.spec(name).unload
    press(page, "Unload…")
    confirm(page, "Unload")
    until(lambda: scripted.spec(name).unload)
    scripted.remove(replica)
    page.get_by_text("The farm has no model of this name.").wait_for()


def test_a_model_is_loaded_by_a_form_that_keeps_what_was_typed(visit: Visit, scripted: ScriptedFarm) -> None:
    """The form says what the API refuses."""
    page = visit(expected=("400",))
    press(page, "Load a model…")
    dialog(page).get_by_label("Source", exact=True).fill("org/from-form")
    dialog(page).get_by_label("Ranks of a replica", exact=True).fill("2")
    dialog(page).get_by_text("More settings").click()
    dialog(page).get_by_label("Devices", exact=True).fill("tpu:0")
    dialog(page).get_by_role("button", name="Load", exact=True).click()
    dialog(page).get_by_role("alert").filter(has_text="'tpu:0'").wait_for()
    dialog(page).get_by_label("Devices", exact=True).fill("cpu")
    confirm(page, "Load")
    spec = scripted.spec("org/from-form")
    assert (spec.source, spec.tp, spec.devices, spec.replicas) == ("org/from-form", 2, ["cpu", "cpu"], 1)
    page.get_by_role("link", name="org/from-form", exact=True).wait_for()
    catalog.put_spec(scripted.client, msgspec.structs.replace(spec, replicas=3))
    press(page, "Load a model…")
    dialog(page).get_by_label("Source", exact=True).fill("org/from-form")
    for answer, ranks in (("Cancel", 2), ("Change model", 1)):
        page.get_by_role("button", name="Load", exact=True).click()
        page.get_by_role("dialog", name="Change org/from-form?").get_by_role("button", name=answer).click()
        until(lambda ranks=ranks: (spec := scripted.spec("org/from-form")).tp == ranks and spec.replicas == 3)
    catalog.forget(scripted.client, spec)


def test_a_host_is_drained_and_taken_back(visit: Visit, scripted: ScriptedFarm) -> None:
    """With what runs on it."""
    page = visit("#/hosts/alpha")
    page.get_by_role("table", name="Ranks").get_by_text("cuda:3").wait_for()
    press(page, "Drain…")
    confirm(page, "Cancel")
    assert membership.drained_hosts(scripted.client) == set()
    press(page, "Drain…")
    confirm(page, "Drain host")
    until(lambda: membership.drained_hosts(scripted.client) == {"alpha"})
    page.get_by_text("drained", exact=True).wait_for()
    press(page, "Take back")
    until(lambda: membership.drained_hosts(scripted.client) == set())


def test_a_script_in_a_name_is_text(visit: Visit, scripted: ScriptedFarm) -> None:
    """In the names of a model and a host, in the cause of a failure, and in the answers to acts."""
    scripted.host(HOSTILE)
    cause = f"{HOSTILE} at 0x0"
    replica = scripted.add(ScriptedReplica(ModelSpec(name=HOSTILE, source="s"), HOSTILE, failure=cause))
    try:
        page = visit()
        page.locator(".findings").get_by_text(cause).wait_for()
        page.get_by_role("table", name="Models").get_by_role("link", name=HOSTILE).first.click()
        page.get_by_role("heading", name=HOSTILE).wait_for()
        press(page, "Pause")
        page.get_by_text(f"{HOSTILE}: paused.").wait_for()
        page.get_by_role("table", name="Ranks of r0").wait_for()
        page.set_viewport_size({"width": 390, "height": 800})
        assert not scrolls_sideways(page)
        for at, name, title in (("history?model=", "tiny", "History"), ("hosts/", HOSTILE, HOSTILE)):
            page.evaluate("([at, name]) => location.hash = `#/${at}${encodeURIComponent(name)}`", [at, name])
            page.locator("main h1").filter(has_text=title).wait_for()
            assert not scrolls_sideways(page), at
        assert page.title().startswith("<script>") and page.locator("main script, main img").count() == 0
    finally:
        scripted.remove(replica)
        del scripted.hosts[HOSTILE]
        scripted.client.srem("furrow:hosts", HOSTILE)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_page_scrolls_sideways_on_a_telephone(visit: Visit, dark: bool) -> None:
    """Every page in 390 pixels, and its text in light and dark at a contrast of at least 4.5."""
    page = visit(width=390, dark=dark)
    for address in PAGES:
        page.evaluate("address => location.hash = address", address)
        page.locator("main h1, main .empty").first.wait_for()
        assert not scrolls_sideways(page), address
        assert page.evaluate(CONTRAST) >= 4.5, address
    page.evaluate("document.querySelector('main h1').style.color = getComputedStyle(document.body).backgroundColor")
    assert page.evaluate(CONTRAST) < 4.5, "the control"


CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b]
    .map((part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const color = rgba(getComputedStyle(element).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const texts = [...document.querySelectorAll("body *")].filter((element) => element.checkVisibility() &&
    [...element.childNodes].some((node) => node.nodeType === 3 && node.nodeValue.trim()));
  return Math.min(...texts.map((element) => {
    const [one, other] = [light(rgba(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
    return (one + 0.05) / (other + 0.05);
  }));
}"""


def test_ended_requests_stay_while_the_page_is_drawn_again(visit: Visit, scripted: ScriptedFarm) -> None:
    """A row that came later too; each snapshot of the farm draws the page anew."""

    def end(name: str, status: int) -> None:
        row = EndedRequest(id=name, path="/v1/completions", status=status, ended_ms=now_ms(), total_ms=9, model="tiny")
        run_every(scripted.client, note([row]))

    end("first-one", 200)
    page = visit("#/requests")
    table = page.get_by_role("table", name="Ended requests")
    table.get_by_text("first-one").wait_for()
    end("second-one", 500)
    table.get_by_text("second-one").wait_for()
    page.evaluate(
        "window.shown = []; setInterval(() => shown.push(document.body.innerText.includes('second-one')), 50)"
    )
    until(lambda: len(page.evaluate("shown")) > 60)
    assert all(page.evaluate("shown")) and table.get_by_text("first-one").is_visible()


def test_settings_that_are_changed_elsewhere_reach_an_open_page(visit: Visit, scripted: ScriptedFarm) -> None:
    """Those that raise no revision too; in an open form all but the field that the visitor has changed."""
    page = visit(LARGE)
    page.get_by_text("5 min", exact=True).wait_for()
    known = scripted.spec("org/large-instruct")
    catalog.put_spec(scripted.client, msgspec.structs.replace(known, drain_s=41, surge=False))
    page.get_by_text("41.0 s", exact=True).wait_for()
    press(page, "Change settings…")
    dialog(page).get_by_text("More settings").click()
    drain, surge = dialog(page).get_by_label("Drain time"), dialog(page).get_by_label("Surge")
    context = dialog(page).get_by_label("Longest context")
    context.fill("512")
    changed = msgspec.structs.replace(known, drain_s=42, max_context=1024)
    catalog.put_spec(scripted.client, changed)
    dialog(page).get_by_role("status").filter(has_text="what you entered is kept").wait_for()
    assert (drain.input_value(), surge.is_checked(), context.input_value()) == ("42", True, "512")
    confirm(page, "Change settings")
    until(lambda: scripted.spec("org/large-instruct").max_context == 512)
    spec = scripted.spec("org/large-instruct")
    assert (spec.drain_s, spec.surge) == (42, True)
    catalog.put_spec(scripted.client, known)


def test_fifty_pages_cost_redis_what_one_does(visit: Visit, scripted: ScriptedFarm, console_api: ApiProcess) -> None:
    """Commands a second, counted by Redis: 49 more followers beside a page."""
    page = visit()
    page.get_by_text("live", exact=True).wait_for()
    one = commands_a_second(page, scripted)
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=console_api.url, timeout=20, limits=limits) as client:
        streams = [client.stream("GET", "/farm/events") for _ in range(49)]
        for stream in streams:
            assert next(stream.__enter__().iter_lines()) == "event: farm"
        fifty = commands_a_second(page, scripted)
        for stream in streams:
            stream.__exit__(None, None, None)
    assert fifty < 1.3 * one, (one, fifty)


def commands_a_second(page: Page, scripted: ScriptedFarm) -> float:
    """Of those that reading the farm takes, over three seconds: the farm itself writes and renews all the time."""
    before = reads(scripted)
    page.wait_for_timeout(3_000)
    return (reads(scripted) - before) / 3


def reads(scripted: ScriptedFarm) -> int:
    stats = scripted.client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("hgetall", "hmget", "smembers", "hvals"))


def test_plots_keep_an_hour_over_a_reload(visit: Visit, scripted: ScriptedFarm) -> None:
    """From the farm's samples, with axes; the newest value stays that of the page's own snapshots."""
    client, now = scripted.client, now_ms()
    client.delete(keys.PLOTS)
    for ago in range(3_590, 0, -10):
        point = Point(rate=90_000.0, first_ms=50.0, queued=3, running=1, kv=0.25)
        run_every(client, keep(PlotSample(at_ms=now - 1_000 * ago, points={FARM: point})))
    page = visit()
    plot = page.locator("figure.plot").filter(has_text="Tokens per second")
    plot.get_by_text("60 min ago").wait_for()
    assert "90,000" in plot.locator(".axis").first.inner_text() and "now" in plot.locator(".axis").last.inner_text()
    until(lambda: "now, at most 90,000" in (plot.locator("svg").get_attribute("aria-label") or ""), 20)
    assert plot.locator("path.line").count() >= 1
    page.reload()
    plot.get_by_text("60 min ago").wait_for()
    client.delete(keys.PLOTS)
