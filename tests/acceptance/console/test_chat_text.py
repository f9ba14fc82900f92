"""The console shows answers as elements: a message can be copied, changed, asked again, and sent with images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.acceptance.console.browser import scrolls_sideways
from tests.acceptance.console.conftest import Visit
from tests.acceptance.console.scripted_farm import ScriptedFarm
from tests.acceptance.console.test_chat_page import said, say
from tests.leader import ScriptedLeader
from tests.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.timeout(180)

ANSWER = """# Plan

A **bold** and *slanted* word, `code with *stars*`, ~~gone~~, snake_case_name and 2 * 3 * 4.

1. first
2. second
   - inner
   - other

> quoted **text**

```python
print("<b>&amp;</b>")  # **not bold**
```

| name | value |
|------|------:|
| a    | `1`   |

[a link](https://example.org/x) https://example.org/bare. [bad](javascript:alert(1)) ![picture](https://example.org/p.png)

<img src=x onerror=alert(1)> <b>tag</b>

---
unclosed **mark and `tick"""

PNG = (
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360000002000001e221bc33"
    "0000000049454e44ae426082"
)


@pytest.fixture
def leader(scripted: ScriptedFarm) -> Iterator[ScriptedLeader]:
    scripted.leader.reset()
    yield scripted.leader
    scripted.leader.reset()


def ended(page: Page, answers: int) -> None:
    until(lambda: page.get_by_text("first after").count() == answers, 20)


def test_an_answer_in_markdown(visit: Visit, leader: ScriptedLeader) -> None:
    """Headings, emphasis, lists, quotes, code, tables and links are elements; tags and scripts stay text."""
    leader.reply = lambda prompt: ANSWER
    for width in (390, 1280):
        page = visit("#/chat?model=tiny", width=width)
        say(page, "x")
        ended(page, 1)
        answer = page.locator(".turn.assistant .markdown")
        assert answer.locator("h3").inner_text() == "Plan"
        assert (
            answer.locator("p strong").first.inner_text() == "bold" and answer.locator("em").inner_text() == "slanted"
        )
        assert answer.locator("p > code").first.inner_text() == "code with *stars*"
        assert "snake_case_name and 2 * 3 * 4." in answer.inner_text()
        assert answer.locator("ol > li").count() == 2 and answer.locator("ol > li ul > li").count() == 2
        assert answer.locator("blockquote strong").inner_text() == "text"
        assert answer.locator("pre code").inner_text() == 'print("<b>&amp;</b>")  # **not bold**'
        assert answer.locator(".code-head span").inner_text() == "python"
        assert answer.locator("td").all_inner_texts() == ["a", "1"] and answer.locator("hr").count() == 1
        links = answer.locator("a")
        assert links.evaluate_all("(all) => all.map((one) => one.href)") == [
            "https://example.org/x",
            "https://example.org/bare",
            "https://example.org/p.png",
        ]
        assert set(links.evaluate_all("(all) => all.map((one) => one.rel)")) == {"noopener noreferrer nofollow"}
        text = answer.inner_text()
        assert "[bad](javascript:alert(1))" in text and "<img src=x onerror=alert(1)> <b>tag</b>" in text
        assert "unclosed **mark and `tick" in text and answer.locator("img, b").count() == 0
        assert not scrolls_sideways(page)


HOSTILE = {
    "stars": "*a " * 60_000,
    "doubled": "**" * 90_000,
    "brackets": "[" * 180_000 + "](",
    "ticks": " ".join("`" * (1 + number % 400) for number in range(900)),
    "quotes": ">" * 180_000,
    "lists": "\n".join("  " * (number % 300) + "- x" for number in range(1_200)),
    "tables": "|".join("x" * 5 for _ in range(30_000)) + "\n" + "|".join("-" for _ in range(30_000)),
    "mixed": "**_~~[`" * 25_000,
    "rules": "- " * 90_000,
    "fences": "```\n" * 40_000,
    "addresses": "http://" * 25_000,
    "long": "x" * 3_000_000,
}


def test_hostile_texts_take_little_time(visit: Visit, leader: ScriptedLeader) -> None:
    """Whatever marks a text repeats: none needs long, and none is lost from the screen."""
    page = visit("#/chat?model=tiny")
    script = """async (text) => {
      const { markdown } = await import("/console/lib/markdown.js");
      const began = performance.now();
      const parts = markdown(text);
      return [performance.now() - began, parts.length];
    }"""
    for name, text in HOSTILE.items():
        took, parts = page.evaluate(script, text)
        assert took < 3_000 and parts > 0, (name, took)


def test_a_message_is_copied_changed_and_asked_again(visit: Visit, leader: ScriptedLeader) -> None:
    """The answer's source is copied; a changed message drops what follows it once it is sent; another answer takes the
    place of the last one."""
    leader.reply = lambda prompt: "**bold** " + prompt.removesuffix("\n").rpartition(": ")[2]
    page = visit("#/chat?model=tiny")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    until(lambda: page.evaluate("document.activeElement.id") == "message", 20)
    for count, text in enumerate(("one", "two"), 1):
        page.keyboard.type(text)  # the box has the focus
        page.keyboard.press("Enter")
        ended(page, count)
    page.get_by_role("button", name="Copy answer").last.click()
    page.get_by_text("Copied.").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "**bold** two"
    page.get_by_role("button", name="Retry: ask for another answer").click()
    until(lambda: len(leader.claimed) == 3 and page.get_by_text("first after").count() == 2, 20)
    assert leader.prompt(-1) == leader.prompt(-2)
    page.get_by_role("button", name="Edit message").first.click()
    assert page.evaluate("document.activeElement.value") == "one"
    page.get_by_text("Sending drops the 3 messages after it.").wait_for()
    page.get_by_role("button", name="Cancel: leave the message as it was").click()
    assert page.evaluate("document.activeElement.value") == "" and page.locator(".turn").count() == 4
    page.get_by_role("button", name="Edit message").first.click()
    page.keyboard.press("End")
    page.keyboard.type(" changed")
    page.keyboard.press("Enter")
    until(lambda: page.locator(".turn").count() == 2 and page.get_by_text("first after").count() == 1, 20)
    assert said(page) == "bold one changed" and "two" not in leader.prompt()


def test_what_is_selected_in_an_answer_stays(visit: Visit, leader: ScriptedLeader) -> None:
    """While snapshots of the farm draw the page again."""
    page = visit("#/chat?model=tiny")
    say(page, "word")
    ended(page, 1)
    page.locator(".turn.assistant .said p").dblclick(position={"x": 8, "y": 8})
    selected = page.evaluate("getSelection().toString()")
    assert selected.strip()
    page.wait_for_timeout(2_500)
    assert page.evaluate("getSelection().toString()") == selected


def test_images_of_a_message(visit: Visit, leader: ScriptedLeader) -> None:
    """Where the model takes images they are chosen, shown, removed and sent before the text; a reload tells that they
    are gone."""
    page = visit("#/chat?model=tiny")
    page.get_by_label("Message", exact=True).wait_for()
    page.wait_for_timeout(500)
    assert page.get_by_label("Add images").count() == 0
    sent: list[dict[str, object]] = []

    def props(route: Route) -> None:
        route.fulfill(json={"modalities": {"vision": True}})

    def answered(route: Route) -> None:
        sent.append(json.loads(route.request.post_data or ""))
        chunk = {"choices": [{"delta": {"content": "a dot"}, "finish_reason": "stop"}]}
        route.fulfill(
            headers={"content-type": "text/event-stream", "x-request-id": "r1"},
            body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n",
        )

    page.route("**/props?**", props)
    page.route("**/v1/chat/completions", answered)
    page.reload()
    picture = {"name": "dot.png", "mimeType": "image/png", "buffer": bytes.fromhex(PNG)}
    page.get_by_label("Add images").set_input_files([picture, picture | {"name": "other.png"}])
    page.get_by_role("button", name="Remove other.png").click()
    assert page.locator(".compose img").count() == 1
    say(page, "What is this?")
    page.get_by_text("a dot").wait_for()
    [body] = sent
    [message] = body["messages"]  # type: ignore[misc]
    kinds = [part["type"] for part in message["content"]]  # type: ignore[index]
    assert kinds == ["image_url", "text"]
    assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")  # type: ignore[index]
    assert page.locator(".turn.user img").count() == 1 and page.locator(".compose img").count() == 0
    page.reload()
    page.get_by_text("1 image of this message: a reload keeps none.").wait_for()
