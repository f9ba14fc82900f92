"""Redis' memory is shared among those who store responses."""

from __future__ import annotations

from typing import Any

from api.generation.archive import Archive
from api.settings import ApiSettings
from control.redis.servers import ServerMemory
from control.sizes import in_words

GIB = 1024**3


def quota(*servers: ServerMemory, owners: int = 1, **settings: Any) -> int:
    unused: Any = None
    archive = Archive(unused, ApiSettings(redis_url="redis://x", **settings))
    archive.share_out(servers, owners)
    return archive.quota.bytes


def server(most: int, machine: int = 64 * GIB) -> ServerMemory:
    return ServerMemory("redis://x", 0, most, machine)


def test_an_owner_gets_a_sixteenth_of_the_smallest_server() -> None:
    """By maxmemory, else by a quarter of what the machine has; a server that says nothing is taken to have 4 GiB."""
    assert quota(server(16 * GIB), server(32 * GIB)) == GIB
    assert quota(server(0, 64 * GIB)) == GIB
    assert quota() == GIB // 4


def test_all_owners_together_get_a_quarter() -> None:
    """However many there are, and whatever the operator allows to each of them."""
    for owners in (1, 4, 5, 100, 10_000):
        assert quota(server(16 * GIB), owners=owners) == min(GIB, 4 * GIB // owners)
    assert quota(server(16 * GIB), response_bytes=1_000, owners=100) == 1_000
    assert quota(server(16 * GIB), response_bytes=64 * GIB, owners=2) == 2 * GIB


def test_sizes_have_at_most_four_digits() -> None:
    """A unit that leaves at most four digits."""
    assert [in_words(size) for size in (0, 512, 1536, 1023 * 1024, 4 * GIB, 5000 * 1024**4)] == [
        "0 bytes",
        "512 bytes",
        "1.5 KiB",
        "1023 KiB",
        "4 GiB",
        "5000 TiB",
    ]
