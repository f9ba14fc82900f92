"""Groups of commands that are imported when they are called."""

from __future__ import annotations

import gc

from ops.common.groups import without_collections


def test_imports_are_not_visited_by_collections() -> None:
    """Neither while they run nor after them."""
    collections = [stats["collections"] for stats in gc.get_stats()]
    with without_collections():
        made = [[] for _ in range(50_000)]
        assert [stats["collections"] for stats in gc.get_stats()] == collections
    try:
        assert gc.isenabled()
        assert not any(one is made[0] for one in gc.get_objects())
    finally:
        gc.unfreeze()
