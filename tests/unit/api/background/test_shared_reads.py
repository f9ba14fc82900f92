"""Equal reads are shared: one for all who ask the same, and none that keeps others waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest

from api.models import farm
from api.models.farm import AccountReads, SharedReads
from control.errors import RedisUnavailable


class Reads:
    """Functions that count their calls and wait until they may go on."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def numbered(self, _: object, *args: Any) -> int:
        self.made.append(args)
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return len(self.made)

    def quick(self, _: object) -> str:
        return "quick"


@pytest.fixture
def reads() -> Iterator[Reads]:
    made = Reads()
    yield made
    made.gate.set()


@pytest.fixture
async def shared(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SharedReads]:
    monkeypatch.setattr(farm, "AGE_S", 60.0)
    made = SharedReads(cast(Any, None))
    yield made
    made.stop()


async def test_all_who_ask_the_same_share_one_read(shared: SharedReads, reads: Reads) -> None:
    """Under way or just made; other arguments are another read, and so is one that is asked for fresh."""
    fifty = (shared.read(reads.numbered, False, "a") for _ in range(50))
    assert await asyncio.gather(*fifty) == [1] * 50
    assert await shared.read(reads.numbered, False, "a") == 1
    assert await shared.read(reads.numbered, False, "b") == 2
    assert await shared.read(reads.numbered, True, "a") == 3 == await shared.read(reads.numbered, False, "a")


async def test_an_answer_ages(shared: SharedReads, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of it is kept."""
    monkeypatch.setattr(farm, "AGE_S", 0.0)
    assert await shared.read(reads.numbered, False) == 1
    assert await shared.read(reads.numbered, False) == 2
    await asyncio.sleep(0.01)
    assert not shared._readings  # type: ignore[reportPrivateUsage]


async def test_what_was_begun_before_a_change_is_not_given_after_it(shared: SharedReads, reads: Reads) -> None:
    """Those who asked before still get it."""
    reads.gate.clear()
    before = asyncio.create_task(shared.read(reads.numbered, False))
    await asyncio.sleep(0)
    shared.forget()
    after = asyncio.create_task(shared.read(reads.numbered, False))
    await asyncio.sleep(0)
    reads.gate.set()
    assert {await before, await after} <= {1, 2} and len(reads.made) == 2
    assert await shared.read(reads.numbered, False) == await after


async def test_a_caller_that_is_cancelled_leaves_the_read_to_the_others(shared: SharedReads, reads: Reads) -> None:
    """The first one too, in whose name it was begun."""
    reads.gate.clear()
    first, second = (asyncio.create_task(shared.read(reads.numbered, False)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    reads.gate.set()
    assert (await second, len(reads.made)) == (1, 1)


async def test_an_error_is_shared_and_not_kept(shared: SharedReads, reads: Reads) -> None:
    """Whoever asks once it was told asks Redis."""
    reads.error = RedisUnavailable("away")
    answers = await asyncio.gather(*(shared.read(reads.numbered, False) for _ in range(3)), return_exceptions=True)
    assert [str(one) for one in answers] == ["away"] * 3 and len(reads.made) == 1
    reads.error = None
    assert await shared.read(reads.numbered, False) == 2


async def test_slow_reads_delay_no_other(shared: SharedReads, reads: Reads) -> None:
    """Several that wait for Redis leave threads for others, and the event loop's own threads to others still."""
    reads.gate.clear()
    slow = [asyncio.create_task(shared.read(reads.numbered, False, name)) for name in range(farm.THREADS - 1)]
    async with asyncio.timeout(5):
        assert await shared.read(reads.quick, False) == "quick"
        assert await asyncio.to_thread(reads.quick, None) == "quick"
    assert not any(task.done() for task in slow)
    reads.gate.set()
    await asyncio.gather(*slow)


async def test_an_account_reads_one_after_the_other(reads: Reads) -> None:
    """Also where its clients leave: however many it asks for, other accounts have a thread."""
    accounts, flood = AccountReads(cast(Any, None)), range(20)
    reads.gate.clear()
    begun = [asyncio.create_task(accounts.read("greedy", reads.numbered, number)) for number in flood]
    await asyncio.sleep(0.05)
    begun[0].cancel()
    async with asyncio.timeout(5):
        assert await accounts.read("other", reads.quick) == "quick"
    assert reads.made == [(0,)]
    reads.error = RedisUnavailable("away")
    reads.gate.set()
    answers = await asyncio.gather(*begun, return_exceptions=True)
    assert [type(one) for one in answers] == [asyncio.CancelledError] + [RedisUnavailable] * 19
    assert reads.made == [(number,) for number in flood]
    reads.error = None
    assert await accounts.read("greedy", reads.numbered, 0) == 21
    accounts.stop()
