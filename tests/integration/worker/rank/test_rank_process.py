"""A rank as a process: what it logs, how it ends, and what it tells the farm when it can't begin."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from control.messages import Assignment, ModelSpec, encode
from control.process import child_environment
from control.replicas.health import end_reason, heartbeats, poison_history, write_poison
from tests.farm import clean_environment
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.waiting import until
from worker.rank.exit_codes import LOAD_FAILED, REFUSED, STOPPED

pytestmark = pytest.mark.timeout(90)
"""A process has to import torch, which takes its time on a busy machine."""

WORLD = 2


@contextmanager
def rank_process(redis: ReplicaRedis, log: Path, device: str, rank: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """A rank of two, as its agent starts it; what it says goes to `log`."""
    spec = ModelSpec(name=MODEL, source="/nowhere", tp=WORLD)
    assignment = Assignment(spec=spec, replica=REPLICA, ranks=[0, 1], devices=["cpu", device])
    environment = clean_environment() | child_environment(
        FURROW_ASSIGNMENT=encode(assignment).decode(),
        FURROW_RANK=str(rank),
        FURROW_DEVICE=device,
        FURROW_FOLDER="/nowhere",
        FURROW_HOST_ID="host",
        FURROW_REDIS_URL=redis.url,
        FURROW_LOG_FORMAT="json",
    )
    with log.open("w") as sink:
        process = subprocess.Popen([sys.executable, "-m", "worker", "rank"], env=environment, stderr=sink)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def test_a_rank_without_its_gpu_refuses_and_says_so_to_all(redis: ReplicaRedis, tmp_path: Path) -> None:
    """The status tells the agent that another try is no use; device and remedy are in log and poison."""
    redis.lead(WORLD)
    log = tmp_path / "log"
    with rank_process(redis, log, "cuda:63") as process:
        assert process.wait(60) == REFUSED
    [line] = [line for line in lines(log) if line["event"] == "refused the assignment"]
    assert (line["model"], line["replica"], line["rank"]) == (MODEL, REPLICA, 1)
    poison = redis.run(poison_history(MODEL, REPLICA))[0].message
    for told in (line["error"], poison):
        assert "cuda:63" in told and "--devices cpu" in told


def test_a_leader_whose_folder_is_away_may_be_tried_again(redis: ReplicaRedis, tmp_path: Path) -> None:
    """The folder was there when the model was loaded, so it may be back: the status is not that of a refusal."""
    log = tmp_path / "log"
    with rank_process(redis, log, "cpu", rank=0) as process:
        assert process.wait(60) == LOAD_FAILED
    reason = redis.run(end_reason(MODEL, REPLICA, 0, "host", process.pid))
    assert reason is not None and "/nowhere does not exist" in reason


def test_its_lines_name_it_and_it_stops_when_told(redis: ReplicaRedis, tmp_path: Path) -> None:
    """Model, replica, rank and epoch are on each line about an epoch; SIGTERM ends it with the status for that."""
    lease, log = redis.lead_for_good(WORLD), tmp_path / "log"
    with rank_process(redis, log, "cpu") as process:
        until(lambda: heartbeats(redis.client, MODEL, REPLICA, WORLD)[1], 60.0)
        write_poison(redis.client, MODEL, REPLICA, lease.epoch, 0, "exited", "the leader is gone")
        [line] = until(lambda: [line for line in lines(log) if line["event"] == "left the epoch"], 40.0)
        assert (line["model"], line["replica"], line["rank"], line["epoch"]) == (MODEL, REPLICA, 1, lease.epoch)
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == STOPPED
