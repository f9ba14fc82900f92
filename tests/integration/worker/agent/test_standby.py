"""The standby of a host: ready before it is needed, then a rank like any other; and what happens without one."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from control.messages import Assignment, ModelSpec
from control.replicas.health import heartbeats, poison_history, write_poison
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.models import make
from tests.supervisor import supervised
from tests.waiting import until
from worker.agent import standby as standby_module
from worker.agent.replica import Exit, ReplicaProcesses
from worker.agent.standby import Preparation, Standby
from worker.health.exit_codes import REFUSED, STOPPED
from worker.supervision.client import SupervisorClient
from worker.supervision.wire import AT_ONCE

STAND_IN = """#!{python} -S
# In the place of python: a standby says that it is ready, unless told otherwise, and notes its duty; then it waits.
import os, signal, sys, time
from pathlib import Path
folder = Path({folder!r})
kind = sys.argv[4]
if kind == "standby":
    if (folder / "broken").exists():
        sys.exit(1)
    if not (folder / "slow").exists():
        os.write(0, b"ready\\n")
    (folder / "duty").write_bytes(os.read(0, 65536))
(folder / (kind + "-" + str(os.getpid()))).touch()
time.sleep(60)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the place of python; its folder."""
    script = tmp_path / "python"
    script.write_text(STAND_IN.format(python=sys.executable, folder=str(tmp_path)))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return tmp_path


@pytest.fixture
def supervisor() -> Iterator[SupervisorClient]:
    with supervised() as client:
        yield client


@pytest.fixture
def standby(supervisor: SupervisorClient) -> Standby:
    return Standby("redis://nowhere", supervisor)


def replica_of(standby: Standby, redis_url: str = "redis://nowhere", device: str = "cpu") -> ReplicaProcesses:
    """Rank 1 of a replica, on this host alone."""
    spec = ModelSpec(name=MODEL, source="/nowhere", tp=2)
    assignment = Assignment(spec=spec, replica=REPLICA, ranks=[1], devices=[device])
    exits: queue.SimpleQueue[Exit] = queue.SimpleQueue()
    return ReplicaProcesses(assignment, "/nowhere", "host", redis_url, standby._supervisor, exits, standby)


def wait_for(standby: Standby, state: str, seconds: float = 40.0) -> None:
    def reached() -> bool:
        standby.tend([], calm=True)
        return standby.state == state

    until(reached, seconds)


def test_only_a_respawn_takes_the_standby(stand_in: Path, standby: Standby) -> None:
    """A first start imports beside its neighbours and leaves it alone; a rank that died is replaced by it, once."""
    wait_for(standby, "ready")
    replica = replica_of(standby)
    replica.spawn_missing()
    assert standby.state == "ready"
    for expected in ("standby", "rank"):
        pid = replica.processes[1].pid
        replica.kill(1)
        exit = replica.exits.get(timeout=40.0)
        assert (exit.pid, exit.status) == (pid, -signal.SIGKILL) and replica.ended(exit)
        assert replica.pause()
        replica.due = 0.0
        replica.spawn_missing()
        until((stand_in / f"{expected}-{replica.processes[1].pid}").exists, 40.0)
    assert json.loads((stand_in / "duty").read_bytes())["FURROW_RANK"] == "1"
    assert standby.state == "off"


def test_one_is_kept_and_only_in_quiet_times(stand_in: Path, standby: Standby) -> None:
    """Nothing starts while a group is on its way up; a second one never does."""
    standby.tend([], calm=False)
    assert standby.state == "off"
    wait_for(standby, "ready")
    process = standby._process
    standby.tend([], calm=True)
    assert standby._process is process


def test_one_that_is_not_ready_or_dead_is_not_taken(stand_in: Path, standby: Standby) -> None:
    """Then a rank starts the slow way at once, instead of waiting for somebody who may never come."""
    (stand_in / "slow").touch()
    wait_for(standby, "starting")
    assert standby.take({}, {}, AT_ONCE) is None and standby.state == "starting"
    standby.stop()
    assert standby.take({}, {}, AT_ONCE) is None and standby.state == "off"
    (stand_in / "slow").unlink()
    wait_for(standby, "ready")
    assert standby._process is not None
    standby._process.kill()
    standby._process.wait()
    assert standby.take({}, {}, AT_ONCE) is None


def test_one_that_dies_is_not_started_again_at_once(
    stand_in: Path, standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby that can't import would otherwise be started five times a second."""
    (stand_in / "broken").touch()
    now = [100.0]
    monkeypatch.setattr(standby_module.time, "monotonic", lambda: now[0])
    standby.tend([], calm=True)
    assert standby._process is not None and standby._process.wait() == 1
    standby.tend([], calm=True)
    assert standby.state == "off"
    now[0] += standby_module.RETRY_S
    standby.tend([], calm=True)
    assert standby.state == "starting"


def real_standby(redis: ReplicaRedis, supervisor: SupervisorClient, models: list[Preparation]) -> Standby:
    """The real thing, with everything imported."""
    standby = Standby(redis.url, supervisor)
    standby.tend(models, calm=True)
    wait_for(standby, "ready", 160.0)
    return standby


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.mark.timeout(240)
def test_a_standby_becomes_a_rank_like_any_other(
    redis: ReplicaRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It waits under its own name, whatever became of the model; then name, heartbeat, log and SIGTERM are a rank's."""
    monkeypatch.setenv("FURROW_LOG_FORMAT", "json")
    lease = redis.lead_for_good(2)
    with supervised() as supervisor:
        standby = real_standby(redis, supervisor, [Preparation(str(tmp_path / "no model"), "auto", "cpu")])
        replica = replica_of(standby, redis.url)
        assert standby._process is not None
        pid = standby._process.pid
        assert comm(pid) == "furrow-standby"
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0), "only the imports are niced"
        replica.attempts = 1
        replica.spawn_missing()
        beat = until(lambda: heartbeats(redis.client, MODEL, REPLICA, 2)[1], 40.0)
        assert beat.pid == pid == replica.pids()[1]
        assert comm(pid) == "furrow-rank-1"
        write_poison(redis.client, MODEL, REPLICA, lease.epoch, 0, "exited", "the leader is gone")
        until(lambda: heartbeats(redis.client, MODEL, REPLICA, 2)[1] is None, 40.0)
        replica.processes[1].terminate()
        assert replica.exits.get(timeout=40.0).status == STOPPED
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    [line] = [line for line in lines if line["event"] == "standby takes over a rank"]
    assert line["rank"] == "1"
    [line] = [line for line in lines if line["event"] == "left the epoch"]
    assert (line["model"], line["replica"], line["rank"], line["epoch"]) == (MODEL, REPLICA, 1, lease.epoch)


@pytest.mark.timeout(240)
def test_a_standby_refuses_what_it_can_not_be(redis: ReplicaRedis, supervisor: SupervisorClient) -> None:
    """Its exit status and its words are those of a rank: here a GPU that is not there."""
    redis.lead_for_good(2)
    replica = replica_of(real_standby(redis, supervisor, []), redis.url, "cuda:63")
    replica.attempts = 1
    replica.spawn_missing()
    assert replica.exits.get(timeout=40.0).status == REFUSED
    assert "cuda:63" in redis.run(poison_history(MODEL, REPLICA))[0].message


@pytest.mark.timeout(240)
def test_a_standby_dies_with_its_supervisor(redis: ReplicaRedis) -> None:
    """kill -9 of the parent leaves nothing behind."""
    with supervised() as supervisor:
        standby = Standby(redis.url, supervisor)
        standby.tend([], calm=True)
        assert standby._process is not None
        process = psutil.Process(standby._process.pid)
        until(lambda: comm(process.pid) == "furrow-standby", 80.0)
        parent = process.parent()
        assert parent is not None
        parent.kill()
        until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 40.0)


@pytest.mark.timeout(240)
def test_importing_creates_no_device_context(tmp_path: Path) -> None:
    """A GPU belongs to its rank alone; the model's code is there, and the number of threads can still be set."""
    folder = str(make("llama", tmp_path / "llama"))
    code = (
        "import sys; from worker.agent.standby import Preparation;"
        "from worker.rank.standby_process import import_in_background;"
        f"import_in_background([Preparation({folder!r}, 'float64', 'cpu')]);"
        "import torch; assert not torch.cuda.is_initialized();"
        "assert 'transformers.models.llama.modeling_llama' in sys.modules;"
        "torch.set_num_threads(3); assert torch.get_num_threads() == 3"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
