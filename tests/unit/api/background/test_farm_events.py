"""Any number of followers share snapshots of the farm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from api.models import farm as farm_module
from api.models.farm import FarmEvents
from api.schemas.farm import FarmCard
from control.errors import RedisUnavailable

CARD = FarmCard(models=[], hosts=[], apis=[], dead_letters={}, keys=0)


class Farm:
    """Counts the readings; `away` makes them fail."""

    def __init__(self) -> None:
        self.readings, self.away = 0, False

    def read(self, client: Any, *, shared: bool) -> FarmCard:
        self.readings += 1
        if self.away:
            raise RedisUnavailable("Redis does not answer")
        return CARD


@pytest.fixture
def farm(monkeypatch: pytest.MonkeyPatch) -> Farm:
    farm = Farm()
    monkeypatch.setattr(farm_module, "read_farm", farm.read)
    monkeypatch.setattr(farm_module, "EVERY_S", 0.05)
    return farm


async def allowed() -> bool:
    return True


async def take(stream: AsyncGenerator[bytes, None], count: int) -> list[bytes]:
    return [await asyncio.wait_for(anext(stream), 20) for _ in range(count)]


async def test_fifty_followers_share_one_reading(farm: Farm) -> None:
    """Each gets the snapshots; the readings are those of one, and end with the last follower."""
    events: Any = FarmEvents(None, lambda: False)  # type: ignore[arg-type]
    streams = [events.follow(allowed) for _ in range(50)]
    await asyncio.gather(*(take(stream, 5) for stream in streams))
    assert 4 <= farm.readings <= 12
    for stream in streams:
        await stream.aclose()
    count = farm.readings
    await asyncio.sleep(0.2)
    assert farm.readings == count


async def test_an_absence_of_redis_is_told_and_ends(farm: Farm) -> None:
    """The same stream has the error, and then the farm again."""
    events: Any = FarmEvents(None, lambda: False)  # type: ignore[arg-type]
    stream = events.follow(allowed)
    assert (await take(stream, 1))[0].startswith(b"event: farm\n")
    farm.away = True
    told = await take(stream, 3)
    assert told[-1] == b'event: away\ndata: {"error":"Redis does not answer"}\n\n'
    farm.away = False
    assert (await take(stream, 3))[-1].startswith(b"event: farm\n")
    await stream.aclose()


async def test_a_stream_ends_with_the_process(farm: Farm) -> None:
    """A process that shuts down lets its pages go to another one."""
    ended: list[int] = []
    events = FarmEvents(None, lambda: bool(ended))  # type: ignore[arg-type]
    stream = events.follow(allowed)
    await take(stream, 1)
    ended.append(1)
    with pytest.raises(StopAsyncIteration):
        await take(stream, 3)
    assert farm.readings < 10
