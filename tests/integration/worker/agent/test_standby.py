"""Ranks are forked from a ready standby: ready before it is needed, then a rank like any other; and what happens
without one."""

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
from tests.supervisor import ROOT, supervised
from tests.waiting import until
from worker.agent import standby as standby_module
from worker.agent.replica import Exit, ReplicaProcesses
from worker.agent.standby import Standby, StandbyModel
from worker.agent.supervision.client import SupervisorClient
from worker.agent.supervision.wire import AT_ONCE
from worker.native import host
from worker.native.compiled import INSTRUCTIONS, _stem
from worker.rank.exit_codes import REFUSED, STOPPED

STAND_IN = """#!{python}
# In the place of python: a standby says that it is ready, unless told otherwise, and forks; a rank notes its duty.
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from worker.agent.supervision.fork_server import serve_forks
from worker.agent.supervision.wire import take_channel
folder = Path({folder!r})
kind, duty = sys.argv[4], os.environ
if kind == "standby":
    if (folder / "broken").exists():
        sys.exit(1)
    channel = take_channel()
    if not (folder / "slow").exists():
        os.write(channel.fileno(), b"ready\\n")
    def prepare(line):
        os.write(channel.fileno(), b"ready " + json.dumps(json.loads(line)["model"]).encode() + b"\\n")
    line = serve_forks(channel, prepare)
    kind, duty = "forked", json.loads(line or sys.exit())
(folder / (kind + "-" + duty["FURROW_RANK"] + "-" + str(os.getpid()))).touch()
time.sleep(60)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the place of python; its folder."""
    script = tmp_path / "python"
    script.write_text(STAND_IN.format(python=sys.executable, folder=str(tmp_path), root=str(ROOT)))
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


def replica_of(
    standby: Standby, redis_url: str = "redis://nowhere", device: str = "cpu", folder: str = "/nowhere"
) -> ReplicaProcesses:
    """Rank 1 of a replica, on this host alone."""
    spec = ModelSpec(name=MODEL, source="/nowhere", tp=2)
    assignment = Assignment(spec=spec, replica=REPLICA, ranks=[1], devices=[device])
    exits: queue.SimpleQueue[Exit] = queue.SimpleQueue()
    return ReplicaProcesses(assignment, folder, "host", redis_url, standby._supervisor, exits, standby)


def wait_for(standby: Standby, state: str, seconds: float = 40.0) -> None:
    def reached() -> bool:
        standby.tend(serving=False)
        return standby.state == state

    until(reached, seconds)


def started(replica: ReplicaProcesses) -> int:
    """The pid of its rank, which waits for the standby while that is of use."""
    until(lambda: replica.spawn_missing() or replica.pids(), 160.0)
    return replica.pids()[1]


def test_every_rank_is_forked(stand_in: Path, standby: Standby) -> None:
    """The first, which waits for the standby's imports, and each one after it, with its own pid and the rank's duty."""
    standby.tend(serving=False)
    replica = replica_of(standby)
    for _ in range(2):
        pid = started(replica)
        until((stand_in / f"forked-1-{pid}").exists, 40.0)
        replica.kill(1)
        exit = replica.exits.get(timeout=40.0)
        assert (exit.pid, exit.status) == (pid, -signal.SIGKILL) and replica.ended(exit)
    assert standby.state == "ready"


def test_a_host_s_first_library_is_compiled_while_the_standby_imports(
    stand_in: Path, standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, for CPU ranks, by a process of its own; also after an upgrade, but not where this version's library is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(stand_in))
    monkeypatch.setattr(host, "unavailable", lambda: None)
    (stand_in / "slow").touch()
    compiled = stand_in / "furrow/compiled"
    compiled.mkdir(parents=True)
    (compiled / "native-0.so").touch()
    standby.tend(serving=False)
    gpu, first = replica_of(standby, device="cuda:0"), replica_of(standby)
    for replica in (gpu, first, first):
        replica.spawn_missing()
        assert not replica.processes, "it waits"
    until(lambda: list(stand_in.glob("compile-1-*")), 40.0)
    (compiled / f"{_stem(host.SOURCE, INSTRUCTIONS['AVX2'])}-9.so").touch()
    later = replica_of(standby)
    later.spawn_missing()
    assert (gpu.compiles, first.compiles, later.compiles) == (False, True, False)


def test_one_is_kept_and_prepares_what_is_in_use(stand_in: Path, standby: Standby) -> None:
    """A second one never starts; it is ready once it has prepared the models, among them one that a rank needs."""
    first, second = StandbyModel("first", "auto", "cpu"), replica_of(standby).preparation
    standby.tend([first], serving=True)
    wait_for(standby, "ready")
    process = standby._process
    assert standby._prepared == {first} and standby.awaited(second) is (standby.state == "starting")
    wait_for(standby, "ready")
    assert standby._process is process and standby._prepared == {first, second}


def test_the_vocabulary_is_prepared_once_the_ranks_serve(stand_in: Path, standby: Standby) -> None:
    """The rank is forked as soon as the code of its model is imported: the first leader makes its own vocabulary, and
    the standby makes one at low priority for the next."""
    model = StandbyModel("first", "auto", "cpu", leads=True)
    code = model._replace(leads=False)
    wait_for(standby, "ready")
    assert standby.awaited(model) is (standby.state == "starting")
    wait_for(standby, "ready")
    standby.tend([model], serving=False)
    assert standby._prepared == {code} and standby.state == "ready" and not standby.awaited(model)
    standby.tend([model], serving=True)
    assert standby._background
    wait_for(standby, "ready")
    assert standby._prepared == {code, model} and not standby.awaited(model)


def test_a_rank_starts_alone_without_a_standby(stand_in: Path, standby: Standby) -> None:
    """At once where it imports at low priority or is dead, and after a time where its imports hang."""
    (stand_in / "slow").touch()
    standby.tend(serving=True)
    replica = replica_of(standby)
    until((stand_in / f"rank-1-{started(replica)}").exists, 40.0)
    standby.stop()
    standby.tend(serving=False)
    assert standby.state == "starting" and standby.awaited(replica.preparation)
    standby._await_by = 0.0
    assert not standby.awaited(replica.preparation)
    (stand_in / "slow").unlink()
    standby.stop()
    wait_for(standby, "ready")
    assert standby._process is not None
    standby._process.kill()
    standby._process.wait()
    assert standby.fork({}, {}, AT_ONCE) is None
    another = replica_of(standby)
    until((stand_in / f"rank-1-{started(another)}").exists, 40.0)


def test_one_that_does_not_fork_is_replaced(stand_in: Path, standby: Standby) -> None:
    """The rank starts alone; the standby ends, so that the next one may do better."""
    wait_for(standby, "ready")
    process = standby._process
    assert process is not None
    process.fork = lambda *words: (_ for _ in ()).throw(OSError("it has 2 threads"))  # type: ignore[method-assign]
    replica = replica_of(standby)
    until((stand_in / f"rank-1-{started(replica)}").exists, 40.0)
    assert process.wait(40.0) == -signal.SIGKILL


def test_one_that_dies_is_not_started_again_at_once(
    stand_in: Path, standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby that can't import would otherwise be started five times a second."""
    (stand_in / "broken").touch()
    now = [100.0]
    monkeypatch.setattr(standby_module.time, "monotonic", lambda: now[0])
    standby.tend(serving=False)
    assert standby._process is not None and standby._process.wait() == 1
    standby.tend(serving=False)
    assert standby.state == "off"
    now[0] += standby_module.RETRY_S
    standby.tend(serving=False)
    assert standby.state == "starting"


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.mark.timeout(240)
def test_a_forked_rank_is_a_rank_like_any_other(
    redis: ReplicaRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Name, heartbeat, log, SIGTERM and refusals are a rank's. The standby has one thread, no context of a device, and
    the code of the model; a rank that does not fit on the host says so."""
    monkeypatch.setenv("FURROW_LOG_FORMAT", "json")
    lease = redis.lead_for_good(2)
    folder = str(make("llama", tmp_path / "llama"))
    with supervised() as supervisor:
        standby = Standby(redis.url, supervisor)
        standby.tend(serving=True)
        wait_for(standby, "ready", 160.0)
        replica = replica_of(standby, redis.url, folder=folder)
        pid = started(replica)
        assert standby._process is not None
        parent = standby._process.pid
        assert comm(parent) == "furrow-standby" and psutil.Process(parent).num_threads() == 1
        assert os.getpriority(os.PRIO_PROCESS, parent) == os.getpriority(os.PRIO_PROCESS, 0), "imports alone are niced"
        beat = until(lambda: heartbeats(redis.client, MODEL, REPLICA, 2)[1], 40.0)
        assert beat.pid == pid and comm(pid) == "furrow-rank-1" and psutil.Process(pid).ppid() != parent
        shared = psutil.Process(pid).memory_full_info()
        assert shared.rss - shared.uss > 30 * 2**20, "it shares the pages of its imports"
        standby._process.kill()
        write_poison(redis.client, MODEL, REPLICA, lease.epoch, 0, "exited", "the leader is gone")
        until(lambda: heartbeats(redis.client, MODEL, REPLICA, 2)[1] is None, 40.0)
        replica.processes[1].terminate()
        assert replica.exits.get(timeout=40.0).status == STOPPED
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    [line] = [line for line in lines if line["event"] == "left the epoch"]
    assert (line["model"], line["replica"], line["rank"], line["epoch"]) == (MODEL, REPLICA, 1, lease.epoch)


@pytest.mark.timeout(240)
def test_preparing_imports_the_code_and_touches_no_device(
    redis: ReplicaRedis, supervisor: SupervisorClient, tmp_path: Path
) -> None:
    """Whatever became of the model's files, ranks are forked and say what is wrong: here a GPU that is not there. The
    vocabulary of a model is made before the fork."""
    redis.lead_for_good(2)
    standby = Standby(redis.url, supervisor)
    standby.tend(serving=False)
    replica = replica_of(standby, redis.url, "cuda:63", str(tmp_path / "no model"))
    started(replica)
    assert replica.exits.get(timeout=40.0).status == REFUSED
    assert "cuda:63" in redis.run(poison_history(MODEL, REPLICA))[0].message
    folder = str(make("llama", tmp_path / "llama"))
    code = (
        "import sys; from worker.agent.standby import StandbyModel;"
        "from worker.agent.supervision.fork_server import *;"
        "from worker.standby_process import import_all, prepare_model;"
        f"import_all(); prepare_model(StandbyModel({folder!r}, 'float64', 'cpu'));"
        "assert 'transformers.models.llama.modeling_llama' in sys.modules; assert not reason_against_fork();"
        "from worker.repository.assets import read_assets; from worker.repository.files import inspect;"
        "from worker.sampling.grammars import vocabulary_of; from pathlib import Path;"
        f"assets = read_assets(inspect(Path({folder!r}), images=False), None);"
        "assert vocabulary_of(assets) is vocabulary_of(assets) and not reason_against_fork(), 'made by the standby';"
        "import torch; torch.set_num_threads(3); assert torch.get_num_threads() == 3;"
        "torch.ones(2000, 2000) @ torch.ones(2000, 2000); assert 'threads' in reason_against_fork()"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180, env=environment)
