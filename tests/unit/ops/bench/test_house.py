"""The count of files that a step runs through."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from control.errors import FurrowError
from ops.bench.house import Recordings, StreamEvents, recording
from ops.client.events import Event
from ops.harness.client import Response

PROGRAM = """
import sys
from control import clock
from control.text import text_stream
import control.keys
print("imported", flush=True)
for line in sys.stdin:
    clock.now_ms()
    print("called", flush=True)
"""


def test_files_of_the_time_that_is_asked_for_count(tmp_path: Path) -> None:
    """Only those of which a function runs: not those that are imported, nor what ran before."""
    environment = {**os.environ, **recording(tmp_path)}
    recordings = Recordings(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[4],
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "imported\n"
        for name in ("", "step"):
            recordings.label(name)
            process.stdin.write("call\n")
            process.stdin.flush()
            assert process.stdout.readline() == "called\n"
        recordings.label("")
        process.stdin.close()
    assert recordings.of("python", "step") == ["control/clock.py"]


class Stream:
    """A response of so many events."""

    def __init__(self, count: int) -> None:
        self._count = count

    async def events(self) -> AsyncIterator[Event]:
        for _ in range(self._count):
            await asyncio.sleep(0)
            yield Event("1", b"{}", b"data: {}")


async def test_an_answer_that_ends_before_its_steps_were_recorded_is_an_error() -> None:
    events = StreamEvents(cast(Response, Stream(3)))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(events.read())
        await events.more(2)
        with pytest.raises(FurrowError, match="ended before its steps were recorded"):
            await events.more(50)


async def test_events_that_came_meanwhile_are_not_waited_for_again() -> None:
    """`more` counts from its call on: an event that waited in a buffer is of a step before."""
    events = StreamEvents(cast(Response, Stream(5)))
    await events.read()
    with pytest.raises(FurrowError):
        await events.more(1)
