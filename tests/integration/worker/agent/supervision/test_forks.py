"""Forked processes are supervised like spawned ones: whatever dies when."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from tests.supervisor import ROOT, Host, supervised_host
from tests.waiting import lives, until
from worker.agent.supervision.client import ChildProcess, SupervisorClient
from worker.agent.supervision.fork_server import serve_forks
from worker.agent.supervision.wire import Ending
from worker.standby_process import tell_supervisor

SERVER = """
import os, sys, threading, time
from worker.agent.supervision.fork_server import reason_against_fork, serve_forks
from worker.agent.supervision.wire import take_channel
channel = take_channel()
if sys.argv[1] == "thread":
    threading.Thread(target=time.sleep, args=[600], name="a worker", daemon=True).start()
if sys.argv[1] == "device":
    import pathlib; pathlib.Path.readlink = lambda path: pathlib.Path("/dev/nvidia0")
channel.sendall(b"ready " + reason_against_fork().encode() + b"\\n")
line = serve_forks(channel, lambda line: None)
if line is not None:
    time.sleep(float(line))
    os._exit(7)
"""
ENDING = Ending(3, signal.SIGTERM)
LONG = "600"


@pytest.fixture
def host() -> Iterator[Host]:
    with supervised_host() as host:
        yield host


def server(client: SupervisorClient, how: str = "plain") -> ChildProcess:
    """A child that forks, once it is ready."""
    child = client.spawn([sys.executable, "-c", SERVER, how], dict(os.environ), {}, ENDING, channel=True)
    until(lambda: child.said, 40.0)
    return child


def test_a_forked_process_is_a_child_of_the_supervisor(host: Host) -> None:
    """Its parent, its exit status, a signal to it, and its label for the next agent are those of a spawned one."""
    client = host.connect()
    forks = server(client)
    short, long = forks.fork("0", {"kind": "short"}, ENDING), forks.fork(LONG, {"kind": "long"}, ENDING)
    assert short.wait(40.0) == 7
    assert psutil.Process(long.pid).ppid() == host.process.pid
    host.lose_agent()
    children_by_kind = {one.tag.get("kind"): one for one in host.connect().inherited}
    assert (children_by_kind["short"].returncode, children_by_kind["long"].pid) == (7, long.pid)
    children_by_kind["long"].kill()
    assert children_by_kind["long"].wait(40.0) == -signal.SIGKILL


def test_forked_processes_outlive_the_one_that_forked_them(host: Host) -> None:
    """kill -9 of it ends none of them; it forks no more, and its successor does."""
    client = host.connect()
    forks = server(client)
    first = forks.fork(LONG, {}, ENDING)
    forks.kill()
    assert forks.wait(40.0) == -signal.SIGKILL
    with pytest.raises(OSError, match="channel"):
        forks.fork(LONG, {}, ENDING)
    second = server(client).fork(LONG, {}, ENDING)
    assert first.poll() is None and second.poll() is None and psutil.pid_exists(first.pid)


def test_forked_processes_die_with_the_supervisor(host: Host) -> None:
    """kill -9 of the supervisor leaves neither the server nor what it forked."""
    client = host.connect()
    forks = server(client)
    processes = [psutil.Process(pid) for pid in (forks.pid, forks.fork(LONG, {}, ENDING).pid)]
    host.process.kill()
    until(lambda: not any(map(lives, processes)), 40.0)


@pytest.mark.parametrize("how", ["plain", "thread", "device"])
def test_a_process_with_threads_or_a_device_is_not_forked(host: Host, how: str) -> None:
    """Its copy would have one thread of several, or a context that it can't use. The plain one is the control."""
    forks = server(host.connect(), how)
    if how == "plain":
        forks.fork(LONG, {}, ENDING)
        return
    with pytest.raises(OSError, match="forked no process"):
        forks.fork(LONG, {}, ENDING)
    reason = {"thread": "2 threads", "device": "/dev/nvidia0"}[how]
    assert reason in forks.said[0] and not psutil.Process(forks.pid).children()


def is_server(process: psutil.Process) -> bool:
    """False for one that ends just now."""
    with suppress(psutil.Error):
        return process.cmdline()[2:3] == [SERVER]
    return False


def test_a_server_that_hangs_is_an_error() -> None:
    """The agent hears of it within the limit; what is forked after that ends by itself."""
    with supervised_host(fork_within_s=0.5) as host:
        forks = server(host.connect())
        forks.send_signal(signal.SIGSTOP)
        with pytest.raises(OSError, match="did not fork in"):
            forks.fork(LONG, {"kind": "late"}, ENDING)
        forks.send_signal(signal.SIGCONT)
        until(lambda: psutil.Process(forks.pid).status() == psutil.STATUS_SLEEPING, 40.0)
        children = psutil.Process(host.process.pid).children
        until(lambda: [one.pid for one in children() if is_server(one)] == [forks.pid], 40.0)
        host.lose_agent()
        assert [one.tag.get("kind") for one in host.connect().inherited] == [None]


def test_a_thread_that_is_ending_is_waited_for() -> None:
    """One that stays is the reason, by name; one that ends within the moment is none."""
    code = (
        "import threading, time; from worker.agent.supervision.fork_server import reason_against_fork as reason;"
        "thread = threading.Thread(target=time.sleep, args=(0.1,)); thread.start(); assert not reason(), reason();"
        "stays = threading.Thread(target=time.sleep, args=(2,), daemon=True); stays.start();"
        "assert '2 threads' in reason()"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_standby_ends_with_its_supervisor() -> None:
    """Its import may end after the supervisor did: that is no error."""
    channel, supervisor = socket.socketpair()
    with channel:
        tell_supervisor(channel, b"unread\n")
        supervisor.close()
        tell_supervisor(channel, b"ready\n")
        assert serve_forks(channel, lambda _: None) is None
