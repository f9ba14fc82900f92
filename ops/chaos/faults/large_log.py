"""A leader killed while hundreds of thousands of logged entries belong to requests that it runs.

The engine would need minutes for so many tokens. Therefore the requests come with a log, as after a loss of data: all
choices but one have ended in it, so that few tokens are prefilled.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from control.messages import GenerationRequest, LogEntry, Sampling
from control.redis.clients import SyncRedis
from control.redis.connection import Call, Steps, run, run_all, run_every
from control.requests import Enqueue, Enqueued, cancel, enqueue_again
from ops.chaos.errors import ChaosError, Harm, NoEffect
from ops.chaos.faults.fault import Fault
from ops.chaos.faults.processes import replaced
from ops.chaos.system.target import Target
from ops.harness.farm import log_lengths, log_of, states

CHOICES = 128
DELIVERED = 100
"""Tokens of each choice in the log that a request comes with."""
CONTINUED = 300
"""Tokens that follow them in the one choice that has not ended."""
UNDER_WAY = 0.25
"""Share of the logs that have grown when the leader is killed; it still reads others."""
PROMPT = 32
"""Tokens."""
KINDS = 4
"""Different requests; the others repeat these."""
ENDED_WITHIN_S = 240.0
TENANT = "chaos"


# --- the requests -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Large:
    """A request and the log that it comes with; it is enqueued many times."""

    params: GenerationRequest
    delivered: list[LogEntry]

    @classmethod
    def draw(cls, random: random.Random) -> Large:
        """Greedy, so that the continuation is a function of the prompt and of the tokens of the open choice."""
        prompt = [random.randrange(10, 100) for _ in range(PROMPT)]
        sampling = Sampling(max_tokens=DELIVERED + CONTINUED, temperature=0.0, n=CHOICES, seed="1")
        return cls(GenerationRequest(prompt=prompt, sampling=sampling), delivered(random, random.randrange(CHOICES)))

    def enqueue(self, model: str, rid: str) -> Steps[Enqueued]:
        request = Enqueue(rid=rid, model=model, params=self.params, tenant=TENANT, on_disconnect="continue")
        return enqueue_again(request, self.delivered)


def delivered(random: random.Random, open_choice: int) -> list[LogEntry]:
    """DELIVERED tokens of each choice, in the order of an engine; all choices but one end with their last token."""
    log: list[LogEntry] = []
    for position, choice in itertools.product(range(DELIVERED), range(CHOICES)):
        ends = position == DELIVERED - 1 and choice != open_choice
        log.append(
            LogEntry(
                seq=len(log) + 1,
                choice=choice,
                token=random.randrange(10, 100),
                finish="stop" if ends else None,
                cause="token" if ends else None,
            )
        )
    return log


def staged(client: SyncRedis, steps: Steps[Enqueued]) -> Call[Enqueued]:
    """Write the log that a request comes with, and return the call that puts the request into its queue."""
    step = next(steps)
    while not (isinstance(step, Call) and step.script == "enqueue"):
        if isinstance(step, Call):
            step = steps.send(run(client, step))
        else:
            step = steps.send(None if step is None else run_every(client, step))
    return step


def wrong(logged: Sequence[LogEntry], delivered: list[LogEntry], expected: list[LogEntry]) -> str | None:
    """The first difference between a log and its expectation: the delivered tokens, and the continuation in `expected`,
    the log of the undisturbed request. None for an exact log."""
    for number, entry in enumerate(logged, 1):
        if entry.seq != number:
            return f"entry {number} has seq {entry.seq}"
        right = (delivered if number <= len(delivered) else expected)[number - 1 : number]
        if [entry] != right:
            return f"entry {number} is {entry}, not {right}"
    return None if len(logged) == len(expected) else f"it has {len(logged)} entries, not {len(expected)}"


# --- the fault --------------------------------------------------------------------------------------------------------


def kill_with_large_logs(target: Target, random: random.Random) -> str:
    """Kill a leader whose requests have `target.log_entries` logged entries; each log must continue exactly."""
    target.wait_until_whole(standby=True)
    model = target.spec.name
    client = target.client
    kinds = [Large.draw(random) for _ in range(KINDS)]
    undisturbed = recorded(target, kinds, random)
    count = -(-target.log_entries // len(kinds[0].delivered))
    requests = [kinds[number % KINDS] for number in range(count)]
    with enqueued(target, requests, random) as rids:
        target.proved(lambda: under_way(client, model, rids, requests), f"{count} requests run, and some go on")
        pid = target.rank_pid(0)
        epoch = target.epoch()
        entries = sum(log_lengths(client, model, rids))
        if entries < target.log_entries or states(client, model, rids) != ["running"] * count:
            raise NoEffect(f"{entries} entries of {target.log_entries} belong to requests that run")
        target.send(pid, signal.SIGKILL)
        proof = replaced(target, 0, pid, epoch)
        ended(target, rids)
        for rid, large in zip(rids, requests, strict=True):
            log = log_of(client, model, rid)
            if why := wrong(log, large.delivered, undisturbed[kinds.index(large)]):
                raise Harm(f"the log of request {rid} is not exact: {why}")
    return f"{proof}; {entries} entries of {count} requests"


def under_way(client: SyncRedis, model: str, rids: Sequence[str], requests: Sequence[Large]) -> bool:
    """True if the leader has all requests and continues enough of them."""
    grown = [
        length > len(large.delivered) for large, length in zip(requests, log_lengths(client, model, rids), strict=True)
    ]
    return sum(grown) >= UNDER_WAY * len(rids) and "queued" not in states(client, model, rids)


def recorded(target: Target, kinds: Sequence[Large], random: random.Random) -> list[list[LogEntry]]:
    """The whole log of each request, left alone. Nothing but its length ends the open choice."""
    with enqueued(target, kinds, random) as rids:
        ended(target, rids)
        logs = [log_of(target.client, target.spec.name, rid) for rid in rids]
    for large, log in zip(kinds, logs, strict=True):
        if len(log) != len(large.delivered) + CONTINUED:
            raise Harm(f"{CONTINUED} tokens should follow {len(large.delivered)} undisturbed, the log has {len(log)}")
    return logs


@contextmanager
def enqueued(target: Target, requests: Sequence[Large], random: random.Random) -> Generator[list[str]]:
    """The ids of the requests, which are put into the queue together after all their logs are written."""
    model = target.spec.name
    client = target.client
    rids = [f"{random.getrandbits(128):032x}" for _ in requests]
    calls = [staged(client, large.enqueue(model, rid)) for rid, large in zip(rids, requests, strict=True)]
    try:
        run_every(client, calls)
        yield rids
    finally:
        run_all(client, [cancel(model, rid, TENANT) for rid in rids])


def ended(target: Target, rids: Sequence[str]) -> None:
    """Wait for the end of the requests. Raises Harm if they don't end, or end in another state."""
    client = target.client
    model = target.spec.name
    try:
        target.until(
            lambda: not {"queued", "running"}.intersection(states(client, model, rids)),
            f"{len(rids)} requests with large logs have ended",
            ENDED_WITHIN_S,
        )
    except ChaosError as error:
        raise Harm(f"{error}: {states(client, model, rids)}") from error
    if set(ends := states(client, model, rids)) != {"finished"}:
        raise Harm(f"requests with large logs ended otherwise than by themselves: {ends}")


FAULTS: dict[str, Fault] = {"large-log": kill_with_large_logs}
