"""Garbage is collected between requests of an API process."""

import gc
import weakref
from collections.abc import Generator

import pytest

from api import garbage
from api.garbage import GarbageCollection


class Node:
    """An object that can be part of a cycle."""

    def __init__(self) -> None:
        self.other: Node | None = None


@pytest.fixture
def collection() -> Generator[GarbageCollection]:
    collection = GarbageCollection()
    collection.start()
    yield collection
    collection.stop()


def visited(node: Node) -> bool:
    """True if the next full collection visits the object."""
    return any(one is node for one in gc.get_objects())


def frozen_cycle() -> weakref.ref[Node]:
    """A cycle that outlived a collection, and that nothing refers to."""
    node = Node()
    node.other = Node()
    node.other.other = node
    gc.collect(1)
    return weakref.ref(node)


def test_objects_that_outlive_a_collection_are_not_visited_again(collection: GarbageCollection) -> None:
    node = Node()
    assert visited(node)
    gc.collect(1)
    assert not visited(node)


def test_the_start_of_a_process_is_not_visited() -> None:
    """With collections off until the start, as `python -m api` has them, nothing that the imports made is visited."""
    node = Node()
    collection = GarbageCollection()
    collections = [stats["collections"] for stats in gc.get_stats()]
    gc.disable()
    try:
        collection.start()
        assert gc.isenabled()
        assert not visited(node)
        assert [stats["collections"] for stats in gc.get_stats()] == collections
    finally:
        gc.enable()
        collection.stop()


def test_no_full_collection_runs_by_itself(collection: GarbageCollection) -> None:
    full: list[int] = []

    def count(phase: str, details: dict[str, int]) -> None:
        if details["generation"] == 2:
            full.append(1)

    gc.callbacks.append(count)
    try:
        kept = [[] for _ in range(500_000)]
    finally:
        gc.callbacks.remove(count)
    assert len(kept) == 500_000
    assert not full


def test_frozen_cycles_are_freed_once_no_request_is_open(
    collection: GarbageCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "_COLLECTIONS_IDLE", 0)
    cycle = frozen_cycle()
    collection.full_if_due(idle=False)
    assert cycle() is not None
    collection.full_if_due(idle=True)
    assert cycle() is None


def test_frozen_cycles_are_freed_beside_open_requests_after_many_collections(
    collection: GarbageCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "_COLLECTIONS_BUSY", 0)
    cycle = frozen_cycle()
    collection.full_if_due(idle=False)
    assert cycle() is None


def test_the_end_brings_automatic_collections_back(collection: GarbageCollection) -> None:
    collection.stop()
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold()[2] < 100
    collection.start()
