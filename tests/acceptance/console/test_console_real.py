"""The console shows the death of a real farm's leader."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.acceptance.console.browser import Watch, chromium
from tests.farm import Farm
from tests.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.timeout(180)

SHOWN_WITHIN_S = 3.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def test_the_next_epoch_after_a_killed_leader_is_shown_within_three_seconds(browser: Browser, farm: Farm) -> None:
    """Counted from the moment at which the next leader took the lock; rates and ranks come back by themselves."""
    page = browser.new_page()
    watch = Watch(page, f"http://{farm.address}")
    page.goto(f"http://{farm.address}/console/#/models/demo")
    page.get_by_role("table", name="Ranks of r0").get_by_text("ready").nth(1).wait_for(timeout=30_000)
    before = int(page.locator(".epoch").inner_text())
    farm.kill("demo", 0, signal.SIGKILL)
    # An epoch's number is the time at which it began, in ms.
    after = until(lambda: epoch if (epoch := int(page.locator(".epoch").inner_text())) > before else 0, 40)
    shown = time.time() - after / 1000
    assert shown < SHOWN_WITHIN_S
    page.get_by_role("table", name="Ranks of r0").get_by_text("ready").nth(1).wait_for(timeout=40_000)
    watch.check()
    page.close()
