"""The time from `furrow serve` to the first token, phase by phase, and the time of `furrow --help`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from control.errors import ModelUnavailable
from ops.bench import program
from ops.bench.common.ask import ask
from ops.bench.common.client import Base
from ops.bench.common.farm import say
from ops.bench.common.figures import Figure, conclude
from ops.bench.common.machine import describe
from ops.bench.common.shapes import SHAPES
from ops.bench.common.summary import median
from ops.bench.peers.models import Models
from ops.demo import MODEL_DIR

PHASES = {
    "Redis and agent": re.compile(r'"event": "agent ready"'),
    "assignment": re.compile(r'"event": "spawned"'),
    "imports": re.compile(r'"event": "leads"'),
    "load": re.compile(r" is served at (http://\S+)/v1"),
}
"""Phase → what the farm prints at its end, in this order. The last one is followed by the first token."""
FIRST_TOKEN = "first token"
LIMITS_S = {"demo": 6.0, "qwen3-0.6b": 10.0}
HELP_S = 0.3
HELP_ROUNDS = 10
LIMIT_S = 300.0
STOP_LIMIT_S = 60.0


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), help="A random model [default: the demonstration model].")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Ranks.")
@click.option("--devices", default="cpu", show_default=True, help="One per rank.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--models", type=click.Path(file_okay=False, path_type=Path), help="Keep the model here, or take it.")
def startup(shape: str | None, tp: int, devices: str, rounds: int, models: Path | None) -> None:
    """Start and stop a farm of one machine and print the median of each phase; exit status 1 over a limit.

    The weights are read once before, so that they are in the page cache.
    """
    click.echo(f"{describe()}\n{shape or 'demo'}, {tp} ranks: medians of {rounds} rounds")
    with ExitStack() as stack:
        if shape is None:
            source = MODEL_DIR
        else:
            scratch = models or Path(stack.enter_context(TemporaryDirectory(prefix="furrow-bench-")))
            source = Models(shape, scratch).checkpoint()
        warm(source)
        options = [str(source), "--name", "bench", "--tp", str(tp), "--devices", devices]
        found = []
        for turn in range(rounds):
            say(f"start {turn + 1} of {rounds}")
            found.append(one_start(options))
    begin = 0.0
    for phase in [*PHASES, FIRST_TOKEN]:
        end = median([moments[phase] for moments in found])
        click.echo(f"  {phase:<18}{end - begin:>8.2f} s   until {end:.2f} s")
        begin = end
    figures = [Figure("furrow --help", median([help_once() for _ in range(HELP_ROUNDS)]), HELP_S, "s")]
    if (name := shape or "demo") in LIMITS_S:
        figures.append(Figure(f"{name}: first token", begin, LIMITS_S[name], "s"))
    conclude(figures)


def warm(folder: Path) -> None:
    """Read the weights, so that the page cache has them."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            while opened.read(2**24):
                pass


def one_start(options: list[str]) -> dict[str, float]:
    """Start a farm, ask it for a token, stop it. Phase → seconds from the start to its end, FIRST_TOKEN among them.

    Raises ModelUnavailable where it ends or is silent before that.
    """
    with TemporaryDirectory(prefix="furrow-bench-") as data:
        command = [sys.executable, "-m", "ops.cli", "serve", *options, "--port", "0", "--data", data]
        kept = {name: value for name, value in os.environ.items() if not name.endswith("REDIS_URL")}
        environment = {**kept, "FURROW_LOG_FORMAT": "json", "FURROW_LOG_LEVEL": "info"}
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        watchdog = threading.Timer(LIMIT_S, process.kill)
        watchdog.start()
        try:
            moments, url = read_phases(process, began)
            sent = time.monotonic()
            answer = asyncio.run(ask(Base.of(url), "bench", "bench", "Hello", 2, stream=True))
            if answer.error is not None or answer.first_ms is None:
                raise ModelUnavailable("bench", "without a token", answer.error or "no text came")
            return {**moments, FIRST_TOKEN: sent - began + (answer.first_ms - answer.sent_ms) / 1000}
        finally:
            watchdog.cancel()
            end(process)


def read_phases(process: subprocess.Popen[str], began: float) -> tuple[dict[str, float], str]:
    """The moment of each phase's end, and the URL. Raises ModelUnavailable where the output ends before the last."""
    assert process.stdout is not None
    moments: dict[str, float] = {}
    words: list[str] = []
    for line in process.stdout:
        words.append(line.strip())
        for phase, sign in PHASES.items():
            if phase not in moments and (match := sign.search(line)):
                moments[phase] = time.monotonic() - began
                if match.groups():
                    return _complete(moments), match.group(1)
    raise ModelUnavailable("bench", "not served", " / ".join(words[-3:]))


def _complete(moments: dict[str, float]) -> dict[str, float]:
    """Raises ModelUnavailable where a phase left no sign: a figure made of nothing is a fault of the measurement."""
    if missing := [phase for phase in PHASES if phase not in moments]:
        raise ModelUnavailable("bench", "served", f"but nothing was printed at the end of: {', '.join(missing)}")
    return moments


def end(process: subprocess.Popen[str]) -> None:
    """Stop the farm and read its output to the end, or it would wait for a reader."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def help_once() -> float:
    """Seconds that `furrow --help` takes."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "ops.cli", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    program.run(startup)
