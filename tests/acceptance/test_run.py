"""`furrow run` survives deaths of the farm's processes; and a private farm leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from control.redis.clients import connect
from control.requests import open_requests
from ops.cli.run.served import Api, HttpFarm
from ops.demo import MODEL_DIR
from tests.farm import Farm, clean_environment, furrow
from tests.terminal import CTRL_C, on_terminal
from tests.waiting import lives, until

pytestmark = pytest.mark.timeout(180)
QUESTION = "Count from 1 to 30."


def said(farm: Farm, settings: tuple[str, ...], strike: Callable[[], object] | None = None) -> str:
    """The standard output of `furrow run` for QUESTION; `strike` is called once an answer has begun to come."""
    command = [sys.executable, "-m", "ops.cli", "run", "demo", QUESTION, "--url", f"http://{farm.address}", *settings]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        begin = process.stdout.read(10)
        if strike is not None:
            strike()
        rest, told = process.stdout.read(), process.stderr.read().decode()
    assert process.returncode == 0 and len(rest) > 20, told
    return (begin + rest).decode()


def kill_api(farm: Farm) -> None:
    [api] = [pid for pid in farm.processes() if "api" in words(pid)]
    psutil.Process(api).kill()


def words(pid: int) -> list[str]:
    """The command line of a process; none where it has ended."""
    try:
        return psutil.Process(pid).cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def kill_leader(farm: Farm) -> None:
    farm.kill("demo", 0)


@pytest.mark.parametrize(
    ("settings", "strike"),
    [(("temperature=0",), kill_leader), (("temperature=0.9", "seed=11"), kill_api)],
    ids=["greedy-leader", "drawn-api"],
)
def test_an_answer_is_the_same_though_a_process_dies(
    farm: Farm, settings: tuple[str, ...], strike: Callable[[Farm], None]
) -> None:
    """It is killed in the middle of the answer; the API process comes back on its port."""
    options = tuple(word for one in settings for word in ("--set", one))
    assert said(farm, options, lambda: strike(farm)) == said(farm, options)


def unread(pipe: int) -> int:
    """Bytes that wait in it."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


def test_a_reader_that_leaves_cancels_the_request(farm: Farm) -> None:
    """As `furrow run … | head -c 10` does: nothing of the answer is computed for nobody. However late the reader is:
    the pipe has room for the first words alone, and the command waits with the others."""
    reading, writing = os.pipe()
    filled = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096) - 16
    os.write(writing, bytes(filled))
    command = [sys.executable, "-m", "ops.cli", "run", "demo", "Count from 1 to 250.", "--set", "temperature=0"]
    with subprocess.Popen(
        [*command, "--url", f"http://{farm.address}"], stdout=writing, stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE, env=clean_environment()
    ) as process, os.fdopen(reading, "rb") as reader:  # fmt: skip
        os.close(writing)
        until(lambda: unread(reading) > filled)
        reader.close()
        assert process.stderr is not None
        assert process.stderr.read() == b"" and process.wait(30) == 1
    until(lambda: not open_requests(farm.redis, ["demo"], 10, None))


def test_a_model_is_loaded_by_the_farms_api(farm: Farm) -> None:
    """One of the name is left as it is, and a pipe gets its answer; the process for it ends with the command."""
    from control.operations.spec import build_spec

    with Api(f"http://{farm.address}", "") as api:
        assert not HttpFarm(api).desire(build_spec("demo", demo=MODEL_DIR), "demo")
    before = len(farm.processes())
    found = furrow("run", "demo", "What is 2 + 3?", "--set", "temperature=0", REDIS_URL=farm.redis_url)
    assert found.returncode == 0 and "5" in found.stdout, found.stderr
    assert len(farm.processes()) == before and farm.redis.zcard("furrow:{demo}:queue:normal") == 0


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_a_private_farm_ends_with_the_terminal(tmp_path: Path) -> None:
    """Ctrl-C ends the answer and its request; a hang-up ends every process, and deletes the data."""
    state = tmp_path / "furrow" / "run"
    options = ("--set", "temperature=0")
    with on_terminal("run", "demo", *options, XDG_STATE_HOME=str(tmp_path), FURROW_STANDBY="0") as terminal:
        terminal.expect(r"demo answers[^>]*>>>")
        [folder] = state.iterdir()
        url = (folder / "redis" / "url").read_text().strip()
        with connect(url) as client:
            ended = ""
            while ended != "stopped":  # on a fast machine an answer may end before the key arrives
                terminal.line("/clear")
                terminal.expect(">>>")
                terminal.line("Count from 1 to 250.")
                terminal.expect("1, 2, 3")
                terminal.send(CTRL_C)
                ended = terminal.expect(r"\[(stopped|\d+ tokens)")[1]
                terminal.expect(">>>")
            until(lambda: client.hget("furrow:{demo}:r0:hb:0", "running") == "0")
            assert not client.keys("furrow:{demo}:queue*")
        terminal.line("What is 2 + 3?")
        terminal.expect("5")
        processes = descendants(terminal.process.pid)
        assert len(processes) >= 4
        os.kill(terminal.process.pid, signal.SIGHUP)
        assert terminal.process.wait(60) == 128 + signal.SIGHUP
    assert not any(map(lives, processes)) and list(state.iterdir()) == []


def test_a_killed_command_leaves_no_process(tmp_path: Path) -> None:
    with on_terminal("run", "demo", XDG_STATE_HOME=str(tmp_path), FURROW_STANDBY="0") as terminal:
        processes = until(lambda: found if len(found := descendants(terminal.process.pid)) >= 3 else None)
        terminal.process.kill()
        terminal.process.wait()
        until(lambda: not any(map(lives, processes)))
