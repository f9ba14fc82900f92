"""Requests of a run, computed once more under other load, chunks and threads: the same tokens from the same logits."""

from __future__ import annotations

import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from control.errors import RequestNotFound
from control.records import catalog
from control.requests.upkeep.replay import KeptRequest, differences, find_kept, replay
from ops.chaos.errors import ChaosError
from ops.chaos.load import Checked, Load, questions
from ops.chaos.system.target import Target
from ops.common.sabotage import Sabotage
from ops.harness.farm import log_of, states

KEEP_S = 86_400
"""Time for which requests of the run are kept."""
AT_ONCE = 64
# The load beside the replays.
STREAMS = 16
QUESTIONS = 16
LENGTH = 96
THREADS = "2"
"""Of each rank, which has one during the run."""
POLL_S = 0.05
WITHIN_S = 1200.0
HASH = 16
"""Hexadecimal digits of a hash."""


def noting(folder: Path) -> Sabotage:
    """Leaders write a hash of each row of logits, beside one of the tokens that it follows, into files in `folder`.
    Nothing else is changed."""
    return Sabotage(
        "leaders note hashes of their logits",
        "worker.sampling.sampler",
        f"""
import array, hashlib, numpy, os
begin, files = module.StepSampler.begin, {{}}

def digest(data):
    return hashlib.blake2b(data, digest_size={HASH // 2}).hexdigest()

def noting(sampler, rows, forward):
    pid = os.getpid()
    if pid not in files:
        files[pid] = open(os.path.join({str(folder)!r}, f"{{pid}}.logits"), "a", buffering=1)
    for row, logits in zip(rows, forward.logits):
        context = array.array("i", [*row.prompt, *row.output, *row.guessed])
        words = digest(context.tobytes()), digest(numpy.asarray(logits).tobytes()), str(len(row.guessed))
        files[pid].write(" ".join(words) + "\\n")
    return begin(sampler, rows, forward)

module.StepSampler.begin = noting
""",
        (),
    )


@dataclass(slots=True)
class Logits:
    """Hashes of logits by the hash of their context."""

    rows: int = 0
    contexts: dict[str, str] = field(default_factory=dict[str, str])
    again: int = 0
    """Rows of a context that had been computed before."""
    differing: int = 0
    guessed: int = 0
    """Rows behind guesses, right or wrong."""

    def read(self, folder: Path) -> None:
        """Take in all files; a line that a killed process did not finish is left out."""
        for path in sorted(folder.glob("*.logits")):
            for line in path.read_text().splitlines():
                context, logits, guesses = (*line.split(" "), "", "", "")[:3]
                if len(context) == len(logits) == HASH and guesses:
                    self.rows += 1
                    self.guessed += guesses != "0"
                    first = self.contexts.setdefault(context, logits)
                    self.again += first is not logits
                    self.differing += first != logits


@dataclass(slots=True)
class ReplayTotals:
    requests: int = 0
    tokens: int = 0
    missing: int = 0
    """Requests that were kept no more: a fault had taken Redis' data."""
    differing: list[str] = field(default_factory=list[str])

    def lines(self, logits: Logits) -> list[str]:
        remark = f" ({self.missing} others were lost with Redis' data)" if self.missing else ""
        return [
            f"replayed {self.requests} requests of {self.tokens} tokens{remark}: {len(self.differing)} differ",
            f"{logits.rows} rows of logits after {len(logits.contexts)} contexts, {logits.guessed} behind guesses, "
            f"{logits.again} computed again: {logits.differing} differ",
            *self.differing[:10],
        ]

    def passed(self, logits: Logits) -> bool:
        """True if nothing differs, and rows were compared."""
        return not self.differing and not logits.differing and logits.again >= self.tokens > 0


def replay_some(target: Target, checked: Iterable[Checked], count: int, seed: int, say: Callable[[str], None]) -> bool:
    """Replay `count` of the exact streams' requests, in another order, beside other streams, with other threads and
    without guesses and shared beginnings. True if nothing differs. Raises ChaosError if fewer were kept."""
    rids = [rid for stream in checked if not stream.findings for rid in stream.attempt.transcript.rids]
    random.Random(seed).shuffle(rids)
    requests, missing = _kept(target, rids, count)
    say(f"{len(requests)} requests are replayed")
    catalog.put_spec(target.client, msgspec.structs.replace(target.spec, lookup=0, prefix_cache=False))
    target.restart_worker(OMP_NUM_THREADS=THREADS)
    target.until(lambda: target.whole() and target.overview().is_rolled_out, "the changed model is served", 240.0)
    load = Load(target.urls, questions(target.spec.name, seed + 1, LENGTH, QUESTIONS), STREAMS, seed + 1)
    load.record()
    load.start()
    outcome = ReplayTotals(missing=missing)
    logits = Logits()
    _compare_all(target, requests, outcome)
    load.stop(target.until)
    assert target.logits is not None, "the farm notes no logits"
    logits.read(target.logits)
    for line in outcome.lines(logits):
        say(line)
    return outcome.passed(logits)


def _kept(target: Target, rids: Sequence[str], count: int) -> tuple[list[KeptRequest], int]:
    """`count` of the requests, and how many were not found before them."""
    requests: list[KeptRequest] = []
    missing = 0
    for rid in rids:
        if len(requests) == count:
            break
        try:
            requests.append(find_kept(target.client, [target.spec.name], rid))
        except RequestNotFound:
            missing += 1
    if len(requests) < count:
        raise ChaosError(f"only {len(requests)} of {count} requests were kept; ask for fewer, or strike more often")
    return requests, missing


def _compare_all(target: Target, requests: Sequence[KeptRequest], outcome: ReplayTotals) -> None:
    """AT_ONCE run together; each is compared when it has ended."""
    client = target.client
    model = target.spec.name
    waiting = deque(requests)
    running = dict[str, KeptRequest]()
    until = time.monotonic() + WITHIN_S
    while waiting or running:
        if time.monotonic() > until:
            raise ChaosError(f"{len(waiting) + len(running)} replays did not end within {WITHIN_S:.0f} s")
        target.tend()
        while waiting and len(running) < AT_ONCE:
            copy = uuid.uuid4().hex
            running[copy] = waiting.popleft()
            replay(client, running[copy], copy)
        for copy, first in list(running.items()):
            if states(client, model, [copy])[0] in ("queued", "running"):
                continue
            entries = log_of(client, model, copy)
            outcome.requests += 1
            outcome.tokens += sum(entry.token is not None for entry in entries)
            outcome.differing += [f"{first.rid}: {difference}" for difference in differences(first, entries)]
            del running[copy]
        time.sleep(POLL_S)
