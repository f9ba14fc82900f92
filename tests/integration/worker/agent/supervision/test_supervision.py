"""A host's supervisor outlives the agent: scripts in the place of agent and ranks; what survives it, what ends with
whom."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.worker.agent.supervision.scene import Scene
from tests.supervisor import supervised_host
from tests.waiting import until
from worker.agent.supervision import supervisor
from worker.agent.supervision.wire import encode_line


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.end()


def test_a_rank_outlives_its_agent_and_the_next_one_is_told_of_it(scene: Scene) -> None:
    """Same process, same label, and the state that the dead agent left."""
    scene.request({"op": "keep", "key": "a", "value": {"b": 1}}, scene.rank("r"))
    scene.start()
    first = scene.nth_agent(1)
    scene.up("r")
    os.kill(first["pid"], signal.SIGKILL)
    second = scene.nth_agent(2)
    [child] = second["children"]
    assert psutil.Process(child["pid"]).ppid() == scene.supervisor.pid
    assert (child["tag"], child["status"], second["kept"]) == ({"name": "r"}, None, {"a": {"b": 1}})
    assert first["children"] == [] and first["kept"] == {} and scene.ended() == []


def test_what_an_agent_asked_for_just_before_its_death_is_done(scene: Scene) -> None:
    """It dies in the middle of a spawn: the next one finds the process, or none was started."""
    (scene.folder / "dies").touch()
    half = json.dumps(scene.rank("half"))[:-9]
    scene.request(scene.rank("whole"))
    with (scene.folder / "requests").open("a") as out:
        out.write(half)
    scene.start()
    first = scene.nth_agent(1)
    until(lambda: not psutil.pid_exists(first["pid"]), 40.0)
    (scene.folder / "dies").unlink()
    later = until(lambda: next((one for one in scene.agents() if one["children"]), None), 40.0)
    assert [child["tag"] for child in later["children"]] == [{"name": "whole"}]


def test_a_signal_does_not_reap_an_agent_that_has_just_ended() -> None:
    """Its exit is still there for the supervisor, which would wait for it for ever."""
    with subprocess.Popen(["true"]) as agent:
        until(lambda: psutil.Process(agent.pid).status() == psutil.STATUS_ZOMBIE, 40.0)
        supervisor.signal_agent(agent, signal.SIGKILL)
        assert os.waitpid(agent.pid, os.WNOHANG)[0] == agent.pid
        agent.returncode = 0


def test_a_request_that_is_not_understood_harms_nothing(scene: Scene) -> None:
    """The agent may be newer than its supervisor: what it does not know is refused, and everything goes on."""
    requests = [{"op": "fly", "id": 7}, {"op": "spawn", "id": 8}, {"op": "fork", "id": 9, "pid": "x"}, {}, ["list"]]
    scene.request(*requests, scene.rank("r"))
    with (scene.folder / "requests").open("a") as out:
        out.write("{not json\n")
    scene.start()
    first = scene.nth_agent(1)
    scene.up("r")
    os.kill(first["pid"], signal.SIGKILL)
    assert len(scene.nth_agent(2)["children"]) == 1


def test_an_exit_without_an_agent_is_kept_until_one_has_acted_on_it() -> None:
    """The status is the true one, a signal's too, and `forget` drops it."""
    with supervised_host() as host:
        child = host.connect().spawn(["sleep", "60"], dict(os.environ), {"a": 1}, (0, 9))
        host.lose_agent()
        os.kill(child.pid, signal.SIGSEGV)
        until(lambda: not psutil.pid_exists(child.pid), 40.0)
        for _ in range(2):  # one that dies before it has acted on it does not take it along
            client = host.connect()
            [told] = client.inherited
            assert (told.pid, told.tag, told.wait(40), told.poll()) == (child.pid, {"a": 1}, -11, -11)
            host.lose_agent()
        client = host.connect()
        client.inherited[0].forget()
        client.spawn(["true"], dict(os.environ), {}, (0, 9)).forget()
        host.lose_agent()
        assert {"a": 1} not in [one.tag for one in host.connect().inherited]


def test_without_an_agent_the_ranks_end_in_order(scene: Scene) -> None:
    """After the limit the leader is told first, as by an agent; the next agent learns how each ended."""
    scene.request(scene.rank("peer", order=1), scene.rank("leader", order=0))
    scene.start(absent_s=0.5)
    first = scene.nth_agent(1)
    scene.up("peer", "leader")
    (scene.folder / "broken").touch()
    os.kill(first["pid"], signal.SIGKILL)
    until(lambda: len(scene.ended()) == 2, 40.0)
    assert scene.ended() == ["leader", "peer"]
    until(lambda: not [one for one in scene.supervisor.children() if one.name() == "sh"], 40.0)
    (scene.folder / "broken").unlink()
    os.kill(scene.nth_agent(2)["pid"], signal.SIGKILL)  # it may have been welcomed before the end
    statuses = {child["tag"]["name"]: child["status"] for child in scene.nth_agent(3)["children"]}
    assert statuses == {"peer": 0, "leader": 0}


def test_an_agent_that_hangs_is_killed_before_another_one_starts(scene: Scene) -> None:
    """Two agents can't act for one host: a stopped one is dead before the next is there. Its ranks are not touched."""
    scene.request(scene.rank("r"))
    scene.start(silent_s=0.5)
    first = scene.nth_agent(1)
    scene.up("r")
    os.kill(first["pid"], signal.SIGSTOP)
    second = scene.nth_agent(2)
    assert not psutil.pid_exists(first["pid"])
    assert [child["status"] for child in second["children"]] == [None]


def test_a_user_signal_replaces_the_agent(scene: Scene) -> None:
    """SIGUSR2 is how an agent is upgraded under load."""
    scene.request(scene.rank("r"))
    scene.start()
    first = scene.nth_agent(1)
    scene.up("r")
    scene.supervisor.send_signal(signal.SIGUSR2)
    second = scene.nth_agent(2)
    assert not psutil.pid_exists(first["pid"]) and len(second["children"]) == 1
    assert scene.ended() == []


@pytest.mark.parametrize("agent", ["obeys", "dead"])
def test_a_stop_leaves_nothing_whether_or_not_there_is_an_agent(scene: Scene, agent: str) -> None:
    """The agent is told, and ends the ranks; what is left without one is ended all the same, in order."""
    scene.request(scene.rank("peer", order=1), scene.rank("leader", order=0))
    scene.start()
    first = scene.nth_agent(1)
    scene.up("peer", "leader")
    processes = scene.supervisor.children()
    if agent == "dead":
        (scene.folder / "broken").touch()
        os.kill(first["pid"], signal.SIGKILL)
    assert scene.process is not None
    scene.process.terminate()
    assert scene.process.wait(40) == 0
    assert scene.ended() == ["leader", "peer"]
    assert not any(process.is_running() for process in processes)


def test_a_first_agent_that_can_not_start_ends_the_supervisor_with_its_status(scene: Scene) -> None:
    """A wrong setting or an absent Redis is told to whoever ran `furrow worker`, instead of being tried for ever."""
    (scene.folder / "broken").touch()
    scene.start()
    assert scene.process is not None and scene.process.wait(40) == 3


def test_orphans_are_reaped(scene: Scene) -> None:
    """As process 1 of a container it inherits what its grandchildren leave behind."""
    orphan = scene.rank("parent") | {"argv": ["sh", "-c", f"(sleep 0.1; touch {scene.folder}/up-orphan) & exit 0"]}
    scene.request(orphan)
    scene.start()
    scene.up("orphan")

    def zombies() -> list[psutil.Process]:
        return [one for one in scene.supervisor.children() if one.status() == psutil.STATUS_ZOMBIE]

    until(lambda: not zombies() and len(scene.supervisor.children()) == 1, 40.0)


def test_the_supervisor_imports_the_standard_library_alone() -> None:
    """Few imports: it starts at once, takes little memory and has little that can fail."""
    code = (
        "import sys; before = {name.partition('.')[0] for name in sys.modules};"
        "import worker.agent.supervision.__main__;"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - before - set(sys.stdlib_module_names)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=40)
    assert out.stdout.split() == ["control", "worker"]


def test_a_wrong_limit_is_refused_by_name() -> None:
    """Told at the start, with the value."""
    command = [sys.executable, "-m", "worker.agent.supervision"]
    environment = {**os.environ, "FURROW_AGENT_ABSENT": "soon"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=40, check=False)
    assert ended.returncode == 1 and "FURROW_AGENT_ABSENT='soon'" in ended.stderr


def test_an_agent_without_a_supervisor_says_how_to_start_it() -> None:
    """It needs the socket that its supervisor gives it."""
    command = [sys.executable, "-m", "worker", "agent"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=40, check=False)
    assert ended.returncode == 1 and "furrow worker" in ended.stderr


def test_an_agent_that_is_stopped_while_it_starts_ends_in_silence() -> None:
    """The stop may be in the packet of the welcome, before anything of the agent is there."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in ({"event": "welcome", "children": [], "kept": {}}, {"event": "stop"}):
            ours.sendall(encode_line(message))
        command = [sys.executable, "-m", "worker", "agent"]
        ended = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=40, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_child_hears_a_line_and_is_heard(tmp_path: Path) -> None:
    """A channel's lines survive the agent that did not read them."""
    with supervised_host() as host:
        client = host.connect()
        script = f"echo ready >&0; read line; echo $line > {tmp_path}/given; sleep 60"
        child = client.spawn(["sh", "-c", script], dict(os.environ), {"kind": "a"}, (0, 9), channel=True)
        host.lose_agent()
        client = host.connect()
        [child] = client.inherited
        until(lambda: child.said == ["ready"], 40.0)
        child.tell("a line")
        until(lambda: (tmp_path / "given").exists() and (tmp_path / "given").read_text() == "a line\n", 40.0)
        child.kill()
        child.wait(40.0)
        with pytest.raises(OSError, match="channel"):
            child.tell("another")


def test_a_program_that_does_not_exist_is_an_error_and_no_end(tmp_path: Path) -> None:
    """The supervisor answers, and serves on."""
    with supervised_host() as host:
        client = host.connect()
        with pytest.raises(OSError, match="nowhere"):
            client.spawn(["/nowhere"], {}, {}, (0, 9))
        assert client.spawn(["true"], dict(os.environ), {}, (0, 9)).wait(40) == 0


def test_the_first_agent_is_this_builds_own_and_the_next_what_the_command_leads_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command starts a `furrow` that becomes the agent: two starts of the interpreter, which only an upgrade
    needs. An agent of the own build comes again when the command has failed too often."""
    started: list[list[str]] = []

    def popen(command: list[str], **_: object) -> psutil.Process:
        started.append(command)
        return psutil.Process()

    monkeypatch.setattr(supervisor.subprocess, "Popen", popen)
    host = supervisor.HostSupervisor(["new"], own_command=["own"])
    for failures in (0, 0, 1, supervisor.FAILURES):
        host._failures = failures
        host.start_agent()
        host._link.close()  # type: ignore[union-attr]
    assert started == [["own"], ["new"], ["new"], ["own"]]
