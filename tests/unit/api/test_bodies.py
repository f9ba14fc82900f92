"""What is read of request bodies at one time is bounded, and a lone request always fits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from api.bodies import Bodies, TooManyBodies


class Sent:
    """A request whose body comes in the given chunks."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks
        self.headers: dict[str, str] = {}

    async def stream(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            await asyncio.sleep(0)
            yield chunk


def sent(*chunks: bytes) -> Any:
    return Sent(*chunks)


async def test_the_bound_holds_over_all_requests() -> None:
    """A second body beyond the bound is refused while the first is in use, and fits afterwards."""
    bodies = Bodies(10)
    async with bodies.reading(sent(b"12345", b"678")) as first:
        assert (first, bodies.held_bytes) == (b"12345678", 8)
        with pytest.raises(TooManyBodies):
            async with bodies.reading(sent(b"a", b"bc")):
                raise AssertionError("it was let in")
        assert bodies.held_bytes == 8
        async with bodies.reading(sent(b"ab")) as small:
            assert small == b"ab"
    async with bodies.reading(sent(b"x" * 50)) as lone:
        assert len(lone) == 50
    assert bodies.held_bytes == 0
