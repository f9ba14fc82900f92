"""The console works by keyboard alone: from the beginning of a page to the effect in Redis, with the focus in sight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from control import access, requests
from control.keys import ModelKeys
from control.messages import GenerationRequest, ModelSpec, Sampling
from control.operations import desired
from control.placement import membership
from control.records import catalog
from control.redis.connection import run
from control.replicas.lease import Lease, acquire
from control.requests import Enqueue
from tests.acceptance.console.conftest import Visit
from tests.acceptance.console.scripted_farm import ScriptedFarm, ScriptedReplica
from tests.acceptance.console.test_chat_text import PNG
from tests.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import FileChooser, FilePayload, Page

pytestmark = pytest.mark.timeout(180)

MODEL = "org/large-instruct"
LARGE = "#/models/org%2Flarge-instruct"
GRAVE = "grave"

FOCUS = """() => {
  const at = document.activeElement;
  const style = getComputedStyle(at);
  const box = at.getBoundingClientRect();
  const [x, y] = [box.x + box.width / 2, box.y + Math.min(box.height, 40) / 2];
  const top = document.elementFromPoint(x, y);
  return {
    tag: at.tagName.toLowerCase(),
    name: at.ariaLabel ?? (at.labels?.length ? at.labels[0].textContent : at.textContent).trim(),
    ring: style.outlineStyle === "solid" && parseFloat(style.outlineWidth) >= 2,
    seen: box.width > 0 && (at.contains(top) || (top?.contains(at) ?? false)),
    dialog: Boolean(at.closest("dialog")),
  };
}"""


class Keys:
    """The keyboard of a page. Every stop must be in sight, with a ring around it."""

    def __init__(self, page: Page) -> None:
        self.page = page

    @property
    def at(self) -> str:
        """The name of what has the focus."""
        return self.page.evaluate(FOCUS)["name"]

    def to(self, name: str, key: str = "Tab", most: int = 80) -> Keys:
        """Press `key` until the focus is at `name`."""
        passed: list[str] = []
        for _ in range(most):
            self.page.keyboard.press(key)
            stop = self.page.evaluate(FOCUS)
            passed.append(stop["name"])
            assert stop["tag"] != "body" and stop["ring"] and stop["seen"], stop
            if stop["name"] == name:
                return self
        pytest.fail(f"{name!r} is no stop: {passed}")

    def press(self, *keys: str) -> Keys:
        for key in keys:
            self.page.keyboard.press(key)
        return self

    def settles_at(self, name: str) -> None:
        """The focus comes to `name`, and a second of snapshots leaves it there."""
        until(lambda: self.at == name)
        self.page.wait_for_timeout(1_200)
        assert self.at == name


def enqueue(model: str, rid: str) -> Enqueue:
    params = GenerationRequest(prompt=list(b"hello"), sampling=Sampling(max_tokens=50))
    return Enqueue(rid=rid, model=model, params=params, tenant="acme")


@pytest.fixture
def lease(scripted: ScriptedFarm) -> Iterator[Lease]:
    """A model that has no life but what a test writes."""
    client = scripted.client
    catalog.put_spec(client, ModelSpec(name=GRAVE, source="s"))
    run(client, catalog.put_replica(GRAVE, "r0", catalog.Assigned(revision=1, tp=2)))
    found = run(client, acquire(GRAVE, "r0", "alpha/1", 2))
    assert found is not None
    yield found
    for key in client.scan_iter("furrow:{grave}:*"):
        client.delete(key)
    client.srem("furrow:models", GRAVE)


def test_a_model_is_paused_scaled_and_unloaded(visit: Visit, scripted: ScriptedFarm) -> None:
    """From the skip link on. The focus goes round in a dialog, and comes back from it."""
    replica = scripted.add(ScriptedReplica(ModelSpec(name="org/steered", source="s", tp=2), "beta"))
    page = visit("#/models/org%2Fsteered", expected=("/farm/models/spec",))
    page.get_by_role("button", name="Unload…").wait_for()
    keys = Keys(page)
    keys.to("Skip to the page", most=1).press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    keys.to("Pause", most=4).press("Enter")
    until(lambda: scripted.spec("org/steered").paused)
    keys.settles_at("Resume")
    keys.press("Space")
    until(lambda: not scripted.spec("org/steered").paused)
    keys.settles_at("Pause")
    keys.to("Scale…").press("Enter").press("Control+a", "2", "Enter")
    until(lambda: scripted.spec("org/steered").replicas == 2)
    until(lambda: keys.at == "Scale…")
    keys.to("Unload…").press("Enter")
    assert keys.at == "Cancel"
    for key, name in (("Tab", "Unload"), ("Tab", "Cancel"), ("Shift+Tab", "Unload"), ("Shift+Tab", "Cancel")):
        keys.to(name, key, 1)
    keys.press("Escape")
    until(lambda: keys.at == "Unload…")
    assert not scripted.spec("org/steered").unload
    keys.press("Enter").to("Unload").press("Enter")
    until(lambda: scripted.spec("org/steered").unload)
    scripted.remove(replica)
    page.get_by_text("The farm has no model of this name.").wait_for()
    keys.settles_at("org/steered")
    keys.to("Go to the farm").press("Enter")
    page.get_by_role("heading", name="Farm").wait_for()


def test_a_finding_is_mended_and_a_model_loaded_from_the_farm_s_page(visit: Visit, scripted: ScriptedFarm) -> None:
    """The button goes with its finding: the focus goes to the next one, then to the page's title."""
    for name in ("tiny", MODEL):
        desired.pause(scripted.client, name, paused=True)
    page = visit()
    page.get_by_role("link", name="tiny is paused").wait_for()
    keys = Keys(page)
    keys.to("Resume").press("Enter")
    until(lambda: not scripted.spec(MODEL).paused)
    page.get_by_role("link", name=f"{MODEL} is paused").wait_for(state="detached")
    keys.settles_at("Resume")
    keys.press("Enter")
    until(lambda: not scripted.spec("tiny").paused)
    keys.settles_at("Farm")
    keys.to("Load a model…").press("Enter")
    page.keyboard.type("org/by-keys")
    keys.to("More settings").press("Enter").to("Number type").press("ArrowDown")
    assert page.evaluate("document.activeElement.value") == "float32"
    page.wait_for_timeout(1_200)
    assert keys.at == "Number type", "a snapshot must not take the focus"
    keys.press("Enter").to("Load", most=20).press("Enter")
    until(lambda: catalog.get_spec(scripted.client, "org/by-keys") is not None)
    assert scripted.spec("org/by-keys").dtype == "float32"
    keys.settles_at("Load a model…")
    catalog.forget(scripted.client, scripted.spec("org/by-keys"))


def test_a_host_is_drained_and_taken_back(visit: Visit, scripted: ScriptedFarm) -> None:
    page = visit("#/hosts/alpha")
    page.get_by_role("table", name="Ranks").get_by_text("cuda:3").wait_for()
    keys = Keys(page)
    keys.to("Drain…").press("Space").press("Enter")  # Cancel has the focus first
    until(lambda: keys.at == "Drain…")
    assert membership.drained_hosts(scripted.client) == set()
    keys.press("Enter").to("Drain host").press("Enter")
    until(lambda: membership.drained_hosts(scripted.client) == {"alpha"})
    keys.settles_at("Take back")
    keys.press("Enter")
    until(lambda: membership.drained_hosts(scripted.client) == set())


def test_requests_are_filtered_and_cancelled(visit: Visit, scripted: ScriptedFarm) -> None:
    """In the list, where the row goes, and on the request's own page, where the button does."""
    client, rids = scripted.client, ("first", "second", "third")
    for rid in rids:
        run(client, requests.enqueue(enqueue(MODEL, rid)))
    page = visit("#/requests")
    page.get_by_text("3 requests, oldest first").wait_for()
    keys = Keys(page)

    def state(rid: str) -> object:
        return client.hget(ModelKeys(MODEL).request(rid), "state")

    keys.to("Cancel request second").press("Enter").to("Cancel request").press("Enter")
    until(lambda: state("second") == "cancelled")
    keys.settles_at("Cancel request third")
    keys.to("State", "Shift+Tab").press("ArrowDown", "ArrowDown")
    page.get_by_text("No request fits this filter.").wait_for()
    keys.settles_at("State")
    keys.press("Home")
    keys.to("first").press("Enter")
    page.get_by_role("heading", name="Timeline").wait_for()
    keys.to("Cancel request").press("Enter").to("Cancel request").press("Enter")
    until(lambda: state("first") == "cancelled")
    keys.settles_at("first")
    client.delete(*client.keys(f"furrow:{{{MODEL}}}:*queue*"), ModelKeys(MODEL).load)


def test_dead_letters_are_dropped_and_retried(visit: Visit, scripted: ScriptedFarm, lease: Lease) -> None:
    client = scripted.client
    for rid in ("one", "two"):
        run(client, requests.enqueue(enqueue(GRAVE, rid)))
        run(client, requests.claim(lease, 1, 100))
        assert run(client, requests.bury(lease, rid, "crashed alone"))
    page = visit("#/dead")
    page.get_by_text("2 letters").wait_for()
    keys = Keys(page)
    keys.to("Drop two").press("Enter").to("Drop").press("Enter")
    page.get_by_text("1 letter,").wait_for()
    keys.settles_at("Drop one")
    keys.to("Retry one", "Shift+Tab").press("Enter").to("Try again").press("Enter")
    until(lambda: client.hget(ModelKeys(GRAVE).load, "queued") == "1")
    page.get_by_text("No dead letters.").wait_for()
    keys.settles_at("Requests that crashed their group alone")


def test_a_key_is_made_and_revoked(visit: Visit, scripted: ScriptedFarm) -> None:
    """The secret is read and copied with keys; the page's menu stays open over a reading of the keys."""
    page = visit("#/keys")
    page.get_by_text("No API key was made.").wait_for()
    keys = Keys(page)
    keys.to("Create key").press("Enter")
    page.keyboard.type("by-keys")
    keys.to("Operator").press("Space").press("Enter")
    page.get_by_role("dialog", name="The key is made").wait_for()
    keys.press("Escape").to("Copy").to("Done").press("Enter")
    [(key, _)] = until(lambda: access.list_keys(scripted.client))
    assert (key.name, key.admin) == ("by-keys", True)
    keys.settles_at("Create key")
    keys.to("Revoke by-keys").press("Enter").to("Revoke").press("Enter")
    until(lambda: access.find(scripted.client, key.id).revoked)
    page.get_by_text("revoked").first.wait_for()
    until(lambda: keys.at == "Usage of by-keys")
    keys.to("Period").press("ArrowDown")
    page.wait_for_timeout(1_200)
    assert keys.at == "Period" and page.evaluate("document.activeElement.value") == "90"


def test_a_model_is_chosen_on_the_history_s_page(visit: Visit, scripted: ScriptedFarm) -> None:
    """Each arrow shows another model, and the next one goes on from there."""
    page = visit(f"#/history?model={MODEL.replace('/', '%2F')}")
    page.get_by_role("combobox").wait_for()
    keys = Keys(page)
    until(lambda: page.get_by_role("combobox").locator("option").count() == 2)
    keys.to("Model", most=20)
    for key, name in (("ArrowDown", "tiny"), ("ArrowUp", MODEL)):
        keys.press(key)
        page.wait_for_url(f"**model={name.replace('/', '%2F')}")
        page.wait_for_timeout(1_200)
        assert page.evaluate("document.activeElement.value") == name


def test_a_chat_is_held_and_stopped(visit: Visit, scripted: ScriptedFarm) -> None:
    """Enter sends, Stop is the next stop; the message has the focus at first, after an end and in a new chat."""
    leader = scripted.leader
    leader.reset()
    page = visit("#/chat?model=tiny")
    page.get_by_text("Try a model.").wait_for()
    keys = Keys(page)
    leader.pause()
    until(lambda: keys.at == "Message", 20)
    page.keyboard.type("by keys")
    keys.press("Shift+Enter").press("Enter")
    until(lambda: leader.claimed, 20)
    leader.step(9)
    page.locator(".turn .said").get_by_text("you said").wait_for()
    keys.to("Stop", most=1).press("Enter")
    until(lambda: scripted.client.hget(ModelKeys("tiny").request(leader.claimed[0].rid), "state") == "cancelled", 20)
    until(lambda: keys.at == "Message")
    page.keyboard.type("again")
    keys.press("Enter")
    until(lambda: len(leader.claimed) == 2, 20)
    keys.to("Stop", most=1)
    leader.resume()
    page.get_by_text("first after").wait_for()
    until(lambda: keys.at == "Message")
    keys.to("New chat", "Shift+Tab").press("Enter")
    page.get_by_text("Try a model.").wait_for()
    assert keys.at == "Message"
    leader.reset()


def test_a_message_is_changed_and_another_answer_asked_for(visit: Visit, scripted: ScriptedFarm) -> None:
    """Retry and Edit are stops behind the messages that they belong to, and the focus goes on from the message box."""
    leader = scripted.leader
    leader.reset()
    page = visit("#/chat?model=tiny")
    keys = Keys(page)
    until(lambda: keys.at == "Message", 20)
    page.keyboard.type("one")
    keys.press("Enter")
    page.get_by_text("first after").wait_for()
    until(lambda: keys.at == "Message")
    keys.to("Retry: ask for another answer", "Shift+Tab", most=10).press("Enter")
    until(lambda: len(leader.claimed) == 2 and page.get_by_text("first after").count() == 1, 20)
    assert leader.prompt(-1) == leader.prompt(-2)
    until(lambda: keys.at == "Message")
    keys.to("Edit message", "Shift+Tab", most=10).press("Enter")
    until(lambda: keys.at == "Message")
    assert page.evaluate("document.activeElement.value") == "one"
    keys.to("Cancel: leave the message as it was", "Shift+Tab", most=4).press("Enter")
    until(lambda: keys.at == "Message")
    assert page.evaluate("document.activeElement.value") == "" and len(leader.claimed) == 2
    keys.to("Edit message", "Shift+Tab", most=10).press("Space")
    until(lambda: keys.at == "Message")
    keys.press("End")
    page.keyboard.type(" changed")
    keys.press("Enter")
    until(lambda: len(leader.claimed) == 3 and page.get_by_text("first after").count() == 1, 20)
    assert "one changed" in leader.prompt() and page.locator(".turn").count() == 2
    leader.reset()


def test_images_are_chosen_and_removed(visit: Visit, scripted: ScriptedFarm) -> None:
    """Add images opens the browser's own choice; a removed image leaves the focus at the message."""
    page = visit("#/chat?model=tiny")
    choosers: list[FileChooser] = []
    # Long before it opens: a choice that is not intercepted yet is the browser's own.
    page.on("filechooser", lambda chooser: choosers.append(chooser))
    page.route("**/props?**", lambda route: route.fulfill(json={"modalities": {"vision": True}}))
    page.reload()
    keys = Keys(page)
    page.get_by_label("Add images").wait_for(state="attached")
    until(lambda: keys.at == "Message", 20)
    keys.to("Add images", "Shift+Tab", most=10)
    keys.press("Enter")
    until(lambda: page.evaluate("1") and choosers, 20)
    picture: FilePayload = {"name": "dot.png", "mimeType": "image/png", "buffer": bytes.fromhex(PNG)}
    choosers[0].set_files([picture, {**picture, "name": "other.png"}])
    page.get_by_role("button", name="Remove other.png").wait_for()
    keys.to("Remove other.png", "Shift+Tab", most=10).press("Enter")
    until(lambda: page.locator(".compose img").count() == 1)
    until(lambda: keys.at == "Message")
    keys.to("Remove dot.png", "Shift+Tab", most=10).press("Space")
    until(lambda: page.locator(".compose img").count() == 0 and keys.at == "Message")
