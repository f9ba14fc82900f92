"""Tenants share a leader: who comes soon, and that nobody's tokens change by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.worker.conftest import ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.waiting import until

HOGS, CHOICES, TOKENS = ("hog-1", "hog-2", "hog-3"), 128, 30
STEPS = 12
"""Of the hog, while a small request comes and ends: the exchange and the claim, its prefill, its two tokens."""


@pytest.fixture
def scene(redis: ReplicaRedis, folder: Path) -> Iterator[LeaderScene]:
    scene = LeaderScene(redis, folder, kv_tokens=256 * 64)
    yield scene
    scene.stop()


def ask_hog(scene: LeaderScene, suffix: str) -> None:
    for number, rid in enumerate(HOGS):
        scene.ask(rid + suffix, tenant="hog", n=CHOICES, max_tokens=TOKENS, temperature=1.0, seed=str(number + 1))


def choices(scene: LeaderScene, rid: str) -> dict[int, list[int | None]]:
    found = defaultdict(list)
    for entry in scene.log(rid):
        found[entry.choice].append(entry.token)
    return found


def furthest(scene: LeaderScene, suffix: str) -> int:
    return max((len(found) for rid in HOGS for found in choices(scene, rid + suffix).values()), default=0)


@pytest.mark.timeout(120)
def test_a_small_request_of_high_priority_beside_a_hog(scene: LeaderScene) -> None:
    """All 256 places and a queue are a hog's: another tenant's two tokens come within a few steps, and every token of
    the hog is that of an undisturbed run."""
    ask_hog(scene, "")
    for rid in HOGS:
        scene.answer(rid)
    ask_hog(scene, "-again")
    until(lambda: scene.ended or furthest(scene, "-again") >= 3, 40.0)
    for turn, priority in enumerate(("high", "normal", "low")):
        before = furthest(scene, "-again")
        rid = f"small-{turn}"
        scene.ask(rid, [50, 60, turn + 1], tenant="other", priority=priority, max_tokens=2)
        assert len(scene.answer(rid)) == 2
        assert scene.state(HOGS[0] + "-again") == "running"
        assert furthest(scene, "-again") - before <= STEPS
    for rid in HOGS:
        scene.answer(rid + "-again")
        assert choices(scene, rid + "-again") == choices(scene, rid)
