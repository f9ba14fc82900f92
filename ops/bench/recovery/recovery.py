"""`furrow bench recovery`: strike ranks and the agent under running requests; time to the next token, where it goes,
and whether the token is the same."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import click
import msgspec
from tokenizers import Tokenizer

from control.clock import now_ms
from control.keys import ReplicaKeys
from control.messages import GenerationRequest, Sampling
from control.placement import membership
from control.redis.clients import SyncRedis
from control.redis.connection import read, run
from control.replicas import health, model_overviews
from control.replicas.health import Formation
from control.requests import Enqueue, enqueue
from ops.common.waiting import until
from ops.harness.farm import DEMO, demo_spec, has_standby, log_lengths, log_of, private_farm, say, states
from ops.harness.models import build
from ops.harness.program import Figure, Outcome, ShapeOrDemo, benchmark, table_row

LENGTH = 160
"""Tokens of a request, unless said otherwise."""
PROMPT = "<|im_start|>user\nCount from 1 to 100.<|im_end|>\n<|im_start|>assistant\n"
STRIKE_AT = 40
"""Tokens in the first request's log when the fault strikes."""
LIMIT_S = 120.0
TICK_S = 0.005
OBSERVED_S = 2.0
"""The least time for which streams are observed after the agent was killed."""


@dataclass(frozen=True)
class RecoveryFarm:
    """A farm of one model on two CPU ranks, and what it says to PROMPT when undisturbed."""

    client: SyncRedis
    prompt: list[int]
    expected: list[int | None]


@dataclass(frozen=True)
class RankStrike:
    """One signal under load: seconds until the first request's log grew again, and where they went; how many of the
    streams ended as undisturbed."""

    gap_s: float
    phases: Phases
    same: int
    streams: int

    @property
    def detected_s(self) -> float:
        """Seconds until the epoch was poisoned."""
        return self.phases.detect / 1000


@contextmanager
def recovery_farm(shape: str | None = None, length: int = LENGTH) -> Generator[RecoveryFarm]:
    """The demonstration model in float64, or a random one of that shape in float32; requests of `length` tokens.

    Raises ModelUnavailable where the farm can't be started.
    """
    with ExitStack() as stack:
        spec = demo_spec(tp=2, dtype="float64")
        if shape is not None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="furrow-bench-")))
            spec = msgspec.structs.replace(spec, source=str(build(shape, folder, "float32")), dtype="float32")
        client = stack.enter_context(private_farm(spec)).client
        prompt = Tokenizer.from_file(f"{spec.source}/tokenizer.json").encode(PROMPT).ids
        [expected] = finished(client, [submit(client, prompt, length)])
        yield RecoveryFarm(client, prompt, expected)


def strike(farm: RecoveryFarm, streams: int, rank: int, strike_signal: signal.Signals) -> RankStrike:
    """Start `streams` requests and send `strike_signal` to the rank's process in the midst of them."""
    client = farm.client
    epoch = wait_until_whole(client)
    rids = [submit(client, farm.prompt, len(farm.expected)) for _ in range(streams)]
    wait_for_length(client, rids[0], STRIKE_AT)
    beat = health.heartbeats(client, DEMO, "r0", 2)[rank]
    if beat is None:
        raise SystemExit(f"rank {rank} was not there to be struck")
    length = log_length(client, rids[0])
    struck_at = time.monotonic()
    struck_ms = now_ms()
    os.kill(beat.pid, strike_signal)

    def epoch_ended() -> bool:
        nonlocal length
        if health.read_epoch(client, DEMO, "r0") != epoch:
            return True
        length = log_length(client, rids[0])
        return False

    # A few tokens may still be on their way: the gap ends with a token of the next epoch.
    until(epoch_ended, f"the end of epoch {epoch}", LIMIT_S, TICK_S)
    if not poisoned_at(client, DEMO, "r0", epoch):
        raise SystemExit(f"epoch {epoch} ended without poison: the strike was not what ended it")
    wait_for_length(client, rids[0], length + 1)
    gap_s = time.monotonic() - struck_at
    token_ms = now_ms()
    same = sum(answer == farm.expected for answer in finished(client, rids))
    return RankStrike(gap_s, observe(client, DEMO, "r0", epoch, struck_ms, token_ms), same, streams)


@dataclass(frozen=True)
class AgentStrike:
    """One SIGKILL of the agent under load."""

    pause_s: float
    """The longest time for which no stream got a token."""
    adopted_s: float
    """Until the next agent beat, which it does once it has adopted."""
    same_processes: bool
    """True if ranks and epoch are the same as before."""
    same: int
    streams: int


def strike_agent(farm: RecoveryFarm, streams: int) -> AgentStrike:
    """Keep `streams` requests under way and kill the agent in the midst of them."""
    client = farm.client
    before = (wait_until_whole(farm.client), _pids(farm.client))
    [(host, agent)] = membership.agents(client).items()
    rids = [submit(client, farm.prompt, len(farm.expected)) for _ in range(streams)]
    wait_for_length(client, rids[0], STRIKE_AT)
    os.kill(agent, signal.SIGKILL)
    struck_at = last = time.monotonic()
    tokens = 0
    longest = 0.0
    adopted = None
    running = list(rids)
    while adopted is None or time.monotonic() - struck_at < OBSERVED_S:
        entries = sum(log_lengths(client, DEMO, rids))
        ended = [state == "finished" for state in states(client, DEMO, running)]
        now = time.monotonic()
        if entries != tokens:
            tokens, longest, last = entries, max(longest, now - last), now
        running = [rid for rid, over in zip(running, ended, strict=True) if not over]
        new = [submit(client, farm.prompt, len(farm.expected)) for _ in range(streams - len(running))]
        rids, running = rids + new, running + new
        if adopted is None and membership.agents(client).get(host) not in (None, agent):
            adopted = now - struck_at
        if now - struck_at > LIMIT_S:
            raise SystemExit(f"the agent was not replaced within {LIMIT_S:.0f} s")
        time.sleep(TICK_S)
    longest = max(longest, time.monotonic() - last)
    same_processes = (health.read_epoch(client, DEMO, "r0"), _pids(client)) == before
    same = sum(answer == farm.expected for answer in finished(client, rids))
    return AgentStrike(longest, adopted, same_processes, same, len(rids))


def _pids(client: SyncRedis) -> list[int]:
    return [beat.pid if beat is not None else 0 for beat in health.heartbeats(client, DEMO, "r0", 2)]


# --- requests ---------------------------------------------------------------------------------------------------------


def submit(client: SyncRedis, prompt: list[int], length: int = LENGTH) -> str:
    """Enqueue one greedy request of at most `length` tokens."""
    sampling = Sampling(max_tokens=length, temperature=0.0)
    params = GenerationRequest(prompt=prompt, sampling=sampling)
    return run(client, enqueue(Enqueue(rid=uuid.uuid4().hex, model=DEMO, params=params, tenant="bench"))).rid


def log_length(client: SyncRedis, rid: str) -> int:
    return len(log_of(client, DEMO, rid))


def wait_for_length(client: SyncRedis, rid: str, length: int) -> None:
    until(lambda: log_length(client, rid) >= length, f"token {length} of request {rid}", LIMIT_S, TICK_S)


def finished(client: SyncRedis, rids: list[str]) -> list[list[int | None]]:
    """The tokens of each request, once all have ended."""

    def ended(rid: str) -> bool:
        entries = log_of(client, DEMO, rid)
        return bool(entries) and entries[-1].finish is not None

    for rid in rids:
        until(lambda rid=rid: ended(rid), f"the end of request {rid}", LIMIT_S, TICK_S)
    return [[entry.token for entry in log_of(client, DEMO, rid)] for rid in rids]


def wait_until_whole(client: SyncRedis) -> int:
    """Until every rank is ready in the current epoch, which is returned, and a standby is ready where one is kept."""
    until(
        lambda: model_overviews.overview(client, DEMO).state == "loaded" and has_standby(client),
        "every rank is ready",
        LIMIT_S,
        TICK_S,
    )
    return health.read_epoch(client, DEMO, "r0")


# --- phases -----------------------------------------------------------------------------------------------------------

TARGETS_MS = {
    "detect": 100,
    "fence": 150,
    "respawn": 300,
    "rendezvous": 200,
    "load": 500,
    "prefill": 250,
}
"""The limit of each phase after a SIGKILL of the demonstration model's rank, with a standby process: 1.5 s in all."""


@dataclass(frozen=True, slots=True)
class Phases:
    """Milliseconds of each phase, in order.

    detect: until the epoch was poisoned. fence: until a leader held the lock of the next. respawn: until every rank
    answered in it. rendezvous: until the group had proved itself with a sum. load: until every rank had its shard.
    prefill: until the first new token was in the log.
    """

    detect: int
    fence: int
    respawn: int
    rendezvous: int
    load: int
    prefill: int


def split(struck_ms: int, poisoned_ms: int, formation: Formation, token_ms: int) -> Phases:
    """All times in ms since 1970. Where the epoch was not poisoned before it was left, nothing was to detect."""
    poisoned_ms = min(max(poisoned_ms, struck_ms), formation.led)
    marks = [struck_ms, poisoned_ms, formation.led, formation.gathered, formation.joined, formation.loaded, token_ms]
    return Phases(*(after - before for before, after in pairwise(marks)))


def observe(client: SyncRedis, model: str, replica: str, epoch: int, struck_ms: int, token_ms: int) -> Phases:
    """The phases from the end of `epoch` to the first token of the next one that was formed; call it when it is there.

    Epochs that were led in between and failed count as part of the fence.
    """
    later = [
        formation
        for formation in run(client, health.formations(model, replica))
        if formation.epoch > epoch and formation.loaded <= token_ms
    ]
    if not later:
        raise LookupError(f"no formation after epoch {epoch} of {model}:{replica} is known")
    return split(struck_ms, poisoned_at(client, model, replica, epoch), later[0], token_ms)


def poisoned_at(client: SyncRedis, model: str, replica: str, epoch: int) -> int:
    """Server ms at which `epoch` was poisoned; 0 if it never was."""

    def parse(reply: list[tuple[str, dict[str, str]]]) -> int:
        return next((int(entry.partition("-")[0]) for entry, poison in reply if int(poison["epoch"]) == epoch), 0)

    return run(client, read("XREVRANGE", ReplicaKeys(model, replica).poisons, "+", "-", "COUNT", 64, parse=parse))


def table(by_fault: dict[str, list[Phases]], targets: dict[str, int] | None) -> str:
    """Medians of each phase per fault, in ms, with the targets below them."""
    names = [field.name for field in fields(Phases)]
    lines = [table_row("phase, median ms", [*names, "in all"], 18, 12)]
    for fault, mine in by_fault.items():
        medians = [round(median(column)) for column in zip(*(astuple(phases) for phases in mine), strict=True)]
        lines.append(table_row(fault, [*medians, sum(medians)], 18, 12))
    if targets is not None:
        values = [targets[name] for name in names]
        lines.append(table_row("target, killed", [*values, sum(values)], 18, 12))
    return "\n".join(lines)


FAULTS: dict[str, tuple[int, signal.Signals]] = {
    "rank killed": (1, signal.SIGKILL),
    "leader killed": (0, signal.SIGKILL),
    "rank stopped": (1, signal.SIGSTOP),
    "leader stopped": (0, signal.SIGSTOP),
}
DETECTION_LIMIT_S = 2.0
"""Of a rank that is stopped, whose steps are short."""
PAUSE_LIMIT_S = 0.2
ADOPTION_LIMIT_S = 2.0


@benchmark
def recovery(
    streams: int = 8,
    times: Annotated[int, "Strikes of each kind."] = 5,
    shape: ShapeOrDemo = None,
    length: Annotated[int, click.IntRange(STRIKE_AT + 20), "Tokens of a request."] = LENGTH,
) -> Outcome:
    """Kill ranks and the agent of a private farm (two CPU ranks), and measure each phase of the recovery.

    Each strike waits until the standby process is ready; FURROW_STANDBY=0 measures without one. In float64 the texts
    must be those of the undisturbed run; a random model is in float32, where a near-tie may fall the other way after a
    recovery, and has no limits.
    """
    strikes: dict[str, list[RankStrike]] = {fault: [] for fault in FAULTS}
    agents: list[AgentStrike] = []
    with recovery_farm(shape, length) as farm:
        for _ in range(times):
            for fault, (rank, strike_signal) in FAULTS.items():
                rank_strike = strike(farm, streams, rank, strike_signal)
                strikes[fault].append(rank_strike)
                say(f"{fault}: next token after {rank_strike.gap_s:.2f} s, {rank_strike.same}/{streams} as undisturbed")
            agents.append(strike_agent(farm, streams))
            say(f"agent killed: no token for {agents[-1].pause_s:.3f} s, adopted after {agents[-1].adopted_s:.2f} s")
    click.echo(f"{'fault':<18}{'strikes':>8}{'token s':>10}{'worst s':>10}{'same text':>12}")
    for fault, mine in strikes.items():
        gaps = [rank_strike.gap_s for rank_strike in mine]
        same = f"{sum(rank_strike.same for rank_strike in mine)}/{sum(rank_strike.streams for rank_strike in mine)}"
        click.echo(f"{fault:<18}{len(mine):>8}{median(gaps):>10.2f}{max(gaps):>10.2f}{same:>12}")
    phases = {fault: [rank_strike.phases for rank_strike in mine] for fault, mine in strikes.items()}
    click.echo(table(phases, TARGETS_MS if shape is None else None))
    figures = figures_of(strikes, agents) if shape is None else None
    return Outcome(figures, {"strikes": strikes, "agents": agents})


def figures_of(strikes: dict[str, list[RankStrike]], agents: list[AgentStrike]) -> list[Figure]:
    """The figures with limits; strikes are by the names of FAULTS."""
    everything = [*(strike for mine in strikes.values() for strike in mine), *agents]
    stopped = [
        strike.detected_s for fault, mine in strikes.items() if FAULTS[fault][1] == signal.SIGSTOP for strike in mine
    ]
    return [
        Figure(
            "streams that ended otherwise than undisturbed",
            sum(strike.streams - strike.same for strike in everything),
            0,
        ),
        Figure("rank stopped: worst time to find it", max(stopped), DETECTION_LIMIT_S, "s"),
        Figure(
            "agent killed: longest pause of all streams", max(agent.pause_s for agent in agents), PAUSE_LIMIT_S, "s"
        ),
        Figure("agent killed: adopted after", max(agent.adopted_s for agent in agents), ADOPTION_LIMIT_S, "s"),
        Figure("agent killed: ranks or epoch replaced", sum(not agent.same_processes for agent in agents), 0),
    ]
