"""The time from `furrow serve` to the first token, phase by phase, its processor time and memory, and the time of
`furrow --help`; and those of llama.cpp's server on the same file, in turns."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import click
import psutil

from control.errors import ModelUnavailable
from control.listening import free_port
from ops.common.waiting import until
from ops.demo import MODEL_DIR
from ops.harness import alphabet
from ops.harness.client import Base, ask, completion
from ops.harness.farm import HOST, end, say, serve
from ops.harness.processes import MIB
from ops.harness.program import Figure, ModelsFolder, ShapeOrDemo, benchmark, models_of, run
from ops.local.ready import get

PHASES = {
    "Redis and agent": re.compile(r'"event": "agent ready"'),
    "assignment": re.compile(r'"event": "spawned"'),
    "imports": re.compile(r'"event": "leads"'),
    "load": re.compile(r" is served at (http://\S+)/v1"),
}
"""Phase → what the farm prints at its end, in this order. The last one is followed by the first token."""
FIRST_TOKEN = "first token"
LIMITS_S = {"demo": 1.2, "qwen3-0.6b f32": 10.0, "qwen3-0.6b q4_k_m": 1.8}
LIMITS_OF_PROCESSOR_S = {"qwen3-0.6b q4_k_m": 2.0}
OTHERS_MIB = 220.0
RANK_SHARE = 1.1
"""Of llama-server's memory, with the same context and type of keys and values."""
CONTEXT = 4096
PROMPT = [70, 71, 72]
"""Letters."""
HELP_S = 0.3
HELP_ROUNDS = 10
LIMIT_S = 300.0


@benchmark
def startup(
    shape: ShapeOrDemo = None,
    weights: Annotated[str, "f32 for the folder, or those of a GGUF file: q4_k_m."] = "f32",
    llama_server: Annotated[
        str | None, click.Path(exists=True, dir_okay=False), "Start llama.cpp's server in turns."
    ] = None,
    tp: Annotated[int, "Ranks."] = 1,
    devices: Annotated[str, "One per rank."] = "cpu",
    rounds: int = 5,
    folder: ModelsFolder = None,
) -> list[Figure]:
    """Start and stop a farm of one machine and print the median of each phase; exit status 1 over a limit.

    The weights are read once before, so that they are in the page cache. The first of the starts is not counted: it may
    compile sources and pack weights.
    """
    if weights != "f32" and shape is None:
        raise click.UsageError(f"--weights {weights} is a file of a random model: give --shape")
    name = f"{shape} {weights}" if shape else "demo"
    click.echo(f"{name}, {tp} ranks: medians of {rounds} rounds")
    with ExitStack() as stack:
        source = MODEL_DIR
        if shape is not None:
            files = stack.enter_context(models_of(shape, folder))
            source = files.checkpoint() if weights == "f32" else files.gguf(weights)
        if llama_server and source.suffix != ".gguf":
            raise click.UsageError("--llama-server reads a GGUF file: give --shape, and --weights of one")
        warm(source)
        options = [str(source), "--name", "bench", "--tp", str(tp), "--devices", devices]
        options += ["--kv-tokens", str(CONTEXT), "--max-context", str(CONTEXT)] if llama_server else []
        starts: list[Start] = []
        peers: list[Start] = []
        for turn in range(rounds + 1):
            say(f"start {turn} of {rounds}" if turn else "a start that is not counted")
            starts.append(one_start(options))
            if llama_server:
                peers.append(start_of_llama(llama_server, source))
    return figures_of(name, starts[1:], peers[1:])


@dataclass(frozen=True)
class Start:
    """The phases of one start, until the first token."""

    moments: dict[str, float]
    """Phase → seconds from the start to its end."""
    processor: dict[str, float]
    """Process → seconds, those of its children that have ended included."""
    memory: dict[str, float]
    """Process → MiB (PSS)."""


def figures_of(name: str, starts: list[Start], peers: list[Start]) -> list[Figure]:
    """Print the medians; what of them has a limit."""
    begin = 0.0
    for phase in [*PHASES, FIRST_TOKEN]:
        end = median([start.moments[phase] for start in starts])
        click.echo(f"  {phase:<18}{end - begin:>8.2f} s   until {end:.2f} s")
        begin = end
    for title in starts[0].processor:
        seconds = median([start.processor.get(title, 0.0) for start in starts])
        mib = median([start.memory.get(title, 0.0) for start in starts])
        click.echo(f"  {title:<18}{seconds:>8.2f} s of a processor, {mib:.0f} MiB")
    processor = median([sum(start.processor.values()) for start in starts])
    others = median([sum(mib for title, mib in start.memory.items() if not is_rank(title)) for start in starts])
    figures = [
        Figure("furrow --help", median([help_once() for _ in range(HELP_ROUNDS)]), HELP_S, "s"),
        Figure("memory of all but the ranks", others, OTHERS_MIB, "MiB"),
    ]
    if name in LIMITS_S:
        figures.append(Figure("first token", begin, LIMITS_S[name], "s"))
    if name in LIMITS_OF_PROCESSOR_S:
        figures.append(Figure("processor time to the first token", processor, LIMITS_OF_PROCESSOR_S[name], "s"))
    click.echo(f"  in all {processor:.2f} s of a processor")
    if peers:
        token = median([peer.moments[FIRST_TOKEN] for peer in peers])
        seconds = median([sum(peer.processor.values()) for peer in peers])
        theirs = median([sum(peer.memory.values()) for peer in peers])
        click.echo(f"  llama-server: first token after {token:.2f} s, {seconds:.2f} s of a processor, {theirs:.0f} MiB")
        ours = median([sum(mib for title, mib in start.memory.items() if is_rank(title)) for start in starts])
        figures.append(Figure("memory of the rank", ours, RANK_SHARE * theirs, "MiB"))
    return figures


def is_rank(title: str) -> bool:
    """True for the title of a rank's process."""
    return title.startswith("furrow-rank")


def look(root: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a processor and MiB of a process and its descendants, by their titles."""
    processor = defaultdict[str, float](float)
    memory = defaultdict[str, float](float)
    parent = psutil.Process(root)
    for process in [parent, *parent.children(recursive=True)]:
        title = Path(f"/proc/{process.pid}/comm").read_text().strip()
        times = process.cpu_times()
        processor[title] += times.user + times.system + times.children_user + times.children_system
        memory[title] += process.memory_full_info().pss / MIB
    return dict(processor), dict(memory)


def warm(source: Path) -> None:
    """Read the weights of a folder or a file, so that the page cache has them."""
    for file in source.glob("*.safetensors") if source.is_dir() else [source]:
        with file.open("rb") as opened:
            while opened.read(2**24):
                pass


def one_start(options: list[str]) -> Start:
    """Start a farm, ask it for a token, stop it. Raises ModelUnavailable or RequestFailed where it ends before that."""
    began = time.monotonic()
    with (
        TemporaryDirectory(prefix="furrow-bench-") as data,
        serve(*options, "--port", "0", "--verbose", "--data", data) as process,
    ):
        watchdog = threading.Timer(LIMIT_S, process.kill)
        watchdog.start()
        try:
            moments, url = read_phases(process, began)
            moments[FIRST_TOKEN] = first_token(Base.of(url), began)
            return Start(moments, *look(process.pid))
        finally:
            watchdog.cancel()


def first_token(base: Base, began: float) -> float:
    """Seconds from `began` until the first token of an answer that is asked for now. Raises RequestFailed."""
    body = completion("bench", alphabet.text_of(PROMPT), 2, ignore_eos=False)
    return asyncio.run(ask(base, body)).check().stamps[0] - began


def start_of_llama(server: str, file: Path) -> Start:
    """The same of llama.cpp's server, with keys and values in float32 as well. Raises RequestFailed."""
    port = free_port(HOST, 0)
    sizes = ["--ctx-size", str(CONTEXT), "--parallel", "1", "--cache-type-k", "f32", "--cache-type-v", "f32"]
    listener = ["--host", HOST, "--port", str(port), "--n-gpu-layers", "0"]
    began = time.monotonic()
    process = subprocess.Popen(
        [server, "--model", str(file), *sizes, *listener],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        until(lambda: get((HOST, port), "/health")[0] == 200, "llama-server is healthy", LIMIT_S, 0.01)
        ready = time.monotonic() - began
        moments = {"load": ready, FIRST_TOKEN: first_token(Base(HOST, port), began)}
        return Start(moments, *look(process.pid))
    finally:
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


def help_once() -> float:
    """Seconds that `furrow --help` takes."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "ops.cli", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    run(startup)
