"""The number of tokens and streams that one API process on one core carries, and the delay of the tokens."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import click

from control.listening import free_port
from control.redis.connection import connect
from ops.bench.fanout.leaders import MODEL, StreamLoad, lead
from ops.bench.fanout.readers import WARM_UP, overhead_ms, read
from ops.common.waiting import until
from ops.harness.exchange import Address
from ops.harness.farm import HOST, NOBODY_REFUSED, part_environment, private_redis, say
from ops.harness.processes import Meter, Process, calling, looking, resident, running, split_cores
from ops.harness.program import Figure, Outcome, Summary, benchmark, run
from ops.local.ready import get

TOKENS_PER_S = 20_000
LATE_MS = 10.0
"""p99 from emit to socket, at half the load."""
OVERHEAD_MS = 2.0
INSIDE_CALLS = 1.5
"""Times the processor time of a token of plain text."""
BUSY = 0.8
"""Of its core: a client process beyond it might be what is measured."""
GROWTH_MIB = 8.0
WHOLE_TOKENS = 16
FLAT_AFTER_S = 120.0
"""Memory is judged in runs that last longer; until then the logs of the first answers still grow."""
READY_WITHIN_S = 60.0


@dataclass
class StreamReport:
    """One load, as its clients saw it. `shares` are of one core, `resident` the API's MiB each second."""

    name: str
    load: StreamLoad
    arrivals: dict[str, float]
    shares: dict[str, float]
    resident: list[float] = field(default_factory=list[float])
    leaders: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def api_us(self) -> float:
        """Microseconds of the API's processor time a token."""
        return 1e6 * self.shares["api"] / self.arrivals["tokens_per_second"]

    def line(self) -> str:
        a = self.arrivals
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in self.shares.items())
        return (
            f"{self.name:<10}{a['tokens_per_second']:>9.0f} tok/s of {self.load.clients * self.load.rate:.0f}, "
            f"{a['tokens_per_read']:.2f} a read, {a['bytes_per_token']:.0f} bytes each; "
            f"{self.api_us:.1f} µs of processor a token; "
            f"late p50 {a['p50_ms']:.1f} ms, p99 {a['p99_ms']:.1f} ms, max {a['max_ms']:.0f} ms; of a core: {shares}"
        )


@benchmark
def fanout(
    clients: Annotated[int, "Streams at one time."] = 1000,
    rate: Annotated[float, "Tokens a second of each stream."] = 21.0,
    replicas: Annotated[int, "Leaders of the streams."] = 16,
    tokens: Annotated[int, click.IntRange(2), "Tokens of an answer."] = 1000,
    seconds: Annotated[float, "Measured time of each load."] = 15.0,
    minutes: Annotated[float, "Longer full load, to measure memory."] = 0.0,
    requests: Annotated[int, click.IntRange(0), "Answers without stream."] = 300,
    only: Annotated[str | None, click.Choice(["whole"]), "Only the answers that are not streamed."] = None,
) -> Outcome:
    """One API process on a core of its own; Redis, leaders without a model and the clients are on the others.

    The leaders emit through Redis as real ones do, and stamp each token just before; the clients read raw bytes and
    compare. In the last load each answer is a call, whose argument is the text. Exit status 1 where a figure is missed.
    """
    own, others = split_cores()
    os.sched_setaffinity(0, others)
    full = StreamLoad(clients, replicas, rate, tokens)
    half = replace(full, rate=rate / 2)
    calls = replace(full, calls=True)
    loads = [("half load", half, seconds), ("full load", full, 60 * minutes or seconds), ("calls", calls, seconds)]
    loads = loads if only is None else []
    with private_redis() as (folder, url), api(own, url) as (part, address):
        reports = [streams(others, folder, url, part, address, *each) for each in loads]
        overhead = whole(others, folder, url, part, address, requests) if requests else None
    return Outcome(figures(reports, overhead), {"loads": reports, "overhead_ms": overhead})


def figures(reports: list[StreamReport], overhead: Summary | None) -> list[Figure]:
    """The figures with limits; `reports`: half load, full load and calls, or nothing without streams."""
    of_streams = _of_streams(*reports) if reports else []
    if overhead is None:
        return of_streams
    return [*of_streams, Figure("p50 of the overhead of a whole answer", overhead.p50, OVERHEAD_MS, "ms")]


def _of_streams(half: StreamReport, full: StreamReport, calls: StreamReport) -> list[Figure]:
    judged = [
        Figure("tokens/s to the clients", full.arrivals["tokens_per_second"], TOKENS_PER_S, at_least=True),
        Figure("streams at one time", full.load.clients, 1000, at_least=True),
        Figure("p99 from emit to socket at half load", half.arrivals["p99_ms"], LATE_MS, "ms"),
        Figure("the clients' share of their core", full.shares["clients"], BUSY),
        Figure("processor time a token in calls, times that of text", calls.api_us / full.api_us, INSIDE_CALLS),
    ]
    quarter = len(full.resident) // 4
    if len(full.resident) > FLAT_AFTER_S:
        parts = full.resident[quarter : 2 * quarter], full.resident[-quarter:]
        begin, end = (sum(part) / len(part) for part in parts)
        judged.append(Figure("growth of the API's memory", end - begin, GROWTH_MIB, "MiB"))
    return judged


@contextmanager
def api(
    cores: set[int], redis_url: str, *more: str, environment: Mapping[str, str] | None = None
) -> Generator[tuple[Process, Address]]:
    """One API process, with `environment` added to its own, and where it listens."""
    port = free_port(HOST, 0)
    arguments = ["--host", HOST, "--port", str(port), "--max-queued", "100000", *NOBODY_REFUSED, *more]
    with running(cores, "api", *arguments, environment=part_environment(redis_url, environment)) as part:
        yield part, (HOST, port)


def streams(
    others: set[int],
    folder: Path,
    redis_url: str,
    part: Process,
    address: Address,
    name: str,
    load: StreamLoad,
    seconds: float,
) -> StreamReport:
    """The load through leaders, Redis and the API process."""
    ring = folder / name.replace(" ", "-")
    with calling(others, lead, ring=ring, redis_url=redis_url, load=load) as leading:
        wait_for_model(address)
        pids = {"api": part.pid, "redis": _server_pid(redis_url), "leaders": leading.pid}
        report = _read(others, name, load, ring, address, seconds, pids)
        # Its clients have left: their requests are to be cancelled before their leaders go.
        wait_for_end(address)
        report.leaders = leading.stop(dict[str, float])
    return report


def whole(others: set[int], folder: Path, redis_url: str, part: Process, address: Address, requests: int) -> Summary:
    """The time of answers that are not streamed, without their leader's time."""
    load = StreamLoad(1, 1, 1.0, WHOLE_TOKENS)
    with calling(others, lead, ring=folder / "whole", redis_url=redis_url, load=load, whole=True) as leading:
        wait_for_model(address)
        say(f"{requests} answers that are not streamed")
        meter = Meter({"api": part.pid})
        overhead = overhead_ms(address, folder / "whole", requests, WHOLE_TOKENS)
        busy = 1000 * meter.processor_s()["api"] / (requests + WARM_UP)
        click.echo(
            f"not streamed: p50 {overhead.p50:.2f} ms, p99 {overhead.p99:.2f} ms beside the leader's time; "
            f"{busy:.2f} ms of the API's processor an answer"
        )
        leading.stop(dict[str, float])
    return overhead


def _read(
    cores: set[int], name: str, load: StreamLoad, ring: Path, address: Address, seconds: float, pids: dict[str, int]
) -> StreamReport:
    """Have the clients read, and measure everybody's processor time meanwhile."""
    say(f"{name}: {load.clients} streams of {load.rate:g} tok/s for {seconds:g} s")
    with calling(cores, read, address=address, ring=ring, load=load, seconds=seconds) as readers:
        readers.await_line("begin")
        meter = Meter({**pids, "clients": readers.pid})
        memory = list[float]()
        with looking(lambda: memory.append(resident(pids["api"])), 1.0):
            arrivals = readers.result(dict[str, float])
            shares = meter.shares()
    report = StreamReport(name, load, arrivals, shares, memory)
    click.echo(report.line())
    return report


def wait_for_model(address: Address, model: str = MODEL) -> None:
    until(lambda: model.encode() in get(address, "/v1/models")[1], "the API lists the model", READY_WITHIN_S)


def wait_for_end(address: Address) -> None:
    """Until the API process follows no request."""
    none = b"furrow_api_followed_requests 0.0\n"
    until(lambda: none in get(address, "/metrics")[1], "the end of every stream", READY_WITHIN_S)


def _server_pid(redis_url: str) -> int:
    with connect(redis_url) as client:
        info: Any = client.info("server")
        return int(info["process_id"])


if __name__ == "__main__":
    run(fanout)
