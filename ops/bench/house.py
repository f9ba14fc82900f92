"""`python -m ops.bench.house`: how many files somebody reads who follows a decode step, a GGUF load or a chat request.

Counts the first-party files of which a function runs: of the leader in the middle of a long answer, in the main thread
and in the one that emits; of a rank while `worker.models.loading.load` runs; of the API process in its main thread from
a chat, which follows others, to the end of its answer. What the leader does once a second, or as its memory grows, is
no part of a step; what an API process does now and then is no part of a chat. Imports do not count. The farm is
private, and its processes record their calls, so they are slow.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import click

from control.errors import FurrowError
from control.messages import ModelSpec
from ops.common.sabotage import run_at_start
from ops.common.waiting import until
from ops.demo import MODEL_DIR
from ops.harness.client import CHAT, Base, Response, ask, chat, request
from ops.harness.farm import private_farm, say
from ops.harness.program import PATH, Outcome, benchmark, run

_TOKENS = 30_000
"""The longest answer; it is left once its steps are recorded. A small model makes some thousand tokens in that time."""
_EVENTS = 50
"""Events of a stream before its steps are recorded, and while they are."""
_CHATS = ("chat 1", "chat 2", "chat 3")
"""Chats that are recorded. A file that one of them lacks belongs to a duty of the process beside the others."""
_CALLS = 10
"""Calls of a file, in so many events, that make it a part of a step."""

_RECORDER = '''"""Written by a count of Furrow's files: records which files have functions that run."""
import json, os, sys, threading, time

FOLDER, ROOT = os.environ["FURROW_HOUSE"], os.environ["FURROW_HOUSE_ROOT"]
label, loads, files = None, 0, {}


def record(frame, event, argument):
    global loads
    code = frame.f_code
    if not (label or loads) and code.co_name != "load":
        return
    path = code.co_filename
    if not path.startswith(ROOT) or "/.venv/" in path or code.co_name == "<module>":
        return
    if code.co_name == "load" and path.endswith("worker/models/loading.py"):
        loads += {"call": 1, "return": -1}.get(event, 0)
    if event == "call":
        for name in (label, "load" if loads else None):
            if name:
                counts = files.setdefault(name, {})
                counts[path[len(ROOT) :]] = counts.get(path[len(ROOT) :], 0) + 1


def watch():
    global label
    last = None
    while True:
        time.sleep(0.02)
        try:
            now = open(os.path.join(FOLDER, "label")).read()
        except OSError:
            now = ""
        label = now or None
        if now != last:
            last = now
            process = " ".join(sys.argv[:2]) + " " + open("/proc/self/comm").read().strip()
            recorded = {name: dict(counts) for name, counts in files.items()}
            path = os.path.join(FOLDER, f"{os.getpid()}.json")
            with open(path + "~", "w") as out:
                json.dump({"process": process, "label": now, "files": recorded}, out)
            os.replace(path + "~", path)


def choose(frame, event, argument):
    chosen = record if threading.current_thread().name == "exchange" else None
    sys.setprofile(chosen)
    if chosen:
        chosen(frame, event, argument)


def begin():
    threading.setprofile(None)
    threading.Thread(target=watch, daemon=True).start()
    threading.setprofile(choose)
    sys.setprofile(record)


begin()
os.register_at_fork(after_in_child=begin)
'''


def recording(folder: Path) -> dict[str, str]:
    """The environment of processes that record into `folder`."""
    root = str(Path(__file__).parents[2]) + os.sep
    names = {"FURROW_HOUSE": str(folder), "FURROW_HOUSE_ROOT": root, "FURROW_STANDBY": "0"}
    return {**run_at_start(folder, _RECORDER), **names}


class Recordings:
    """The recordings of a farm's processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._label = folder / "label"

    def label(self, name: str) -> None:
        """Record under this name from now on, in every process that runs; nothing where it is empty."""
        self._label.write_text(name)
        until(lambda: self._labels() == {name}, "the processes record")

    def _labels(self) -> set[str]:
        return {
            self._read(path)["label"] for path in self._folder.glob("*.json") if Path(f"/proc/{path.stem}").exists()
        }

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        return json.loads(path.read_text())

    def of(self, process: str, name: str, calls: int = 1) -> list[str]:
        """Files with so many calls that a process whose name has `process` recorded under a name, in order; of several
        processes, the longest list."""
        lists: list[list[str]] = [[]]
        for path in self._folder.glob("*.json"):
            recorded = self._read(path)
            if process in recorded["process"]:
                counts: dict[str, int] = recorded["files"].get(name, {})
                lists.append(sorted(path for path, count in counts.items() if count >= calls))
        return max(lists, key=len)


async def _record(base: Base, model: str, recordings: Recordings) -> None:
    """Record steps in the middle of a long answer, then short chats after others."""
    await _record_steps(base, model, recordings)
    for name in ("", "", *_CHATS):
        await asyncio.to_thread(recordings.label, name)
        await ask(base, chat(model, "Hello.", 8), user="reader")
    await asyncio.to_thread(recordings.label, "")


async def _record_steps(base: Base, model: str, recordings: Recordings) -> None:
    """Record from some tokens of an answer to others. Raises FurrowError where the answer ends before."""
    async with request(base, "POST", CHAT, body=chat(model, "Count.", _TOKENS)) as response:
        events = StreamEvents(response)
        reading = asyncio.create_task(events.read())
        try:
            for name in ("step", ""):
                await events.more(_EVENTS)
                await asyncio.to_thread(recordings.label, name)
            await events.more(1)
        finally:
            reading.cancel()


class StreamEvents:
    """Counts the events of a stream as they come, also while processes take a label: none waits in a buffer, so that
    events after a label belong to steps after it."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._count = 0
        self._ended = False
        self._change = asyncio.Condition()

    async def read(self) -> None:
        """Count until the stream ends."""
        try:
            async for _ in self._response.events():
                async with self._change:
                    self._count += 1
                    self._change.notify_all()
        finally:
            async with self._change:
                self._ended = True
                self._change.notify_all()

    async def more(self, events: int) -> None:
        """Wait for so many events. Raises FurrowError where the stream ends before."""
        goal = self._count + events
        async with self._change:
            await self._change.wait_for(lambda: self._count >= goal or self._ended)
        if self._count < goal:
            raise FurrowError(f"the answer of up to {_TOKENS} tokens ended before its steps were recorded: try --model")


def count(checkpoint: Path) -> dict[str, list[str]]:
    """The files of a decode step, a load and a chat with this model. Raises ModelUnavailable."""
    with tempfile.TemporaryDirectory(prefix="furrow-house-") as name:
        folder = Path(name)
        spec = ModelSpec(name="model", source=str(checkpoint))
        with private_farm(spec, environment=recording(folder)) as farm:
            recordings = Recordings(folder)
            asyncio.run(_record(farm.base, farm.names[0], recordings))
            return {
                "decode step": recordings.of("rank", "step", _CALLS),
                "load": recordings.of("rank", "load"),
                "chat request": sorted(set.intersection(*(set(recordings.of("api", name)) for name in _CHATS))),
            }


@benchmark
def house(
    model: Annotated[Path, PATH, "Checkpoint or GGUF file."] = MODEL_DIR,
    files: Annotated[bool, "Name the files."] = False,
) -> Outcome:
    """Count the files of a decode step, a load and a chat request."""
    say(f"serving {model}")
    counted = count(model)
    for subject, paths in counted.items():
        click.echo(f"{subject}: {len(paths)} files")
        if files:
            click.echo("".join(f"  {path}\n" for path in paths), nl=False)
    return Outcome(details=counted)


if __name__ == "__main__":
    run(house)
