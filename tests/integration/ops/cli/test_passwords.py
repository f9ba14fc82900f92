"""Redis' password stands in no command line, output or log: a path can name the server instead."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from control.errors import SettingsError
from control.redis.urls import password_in
from control.settings import redis_reference, redis_url
from ops.local.embedded import EmbeddedServer
from tests.farm import clean_environment, furrow, serving_farm

SECRET = "hunter2-Of-The-Test"


def command_lines(containing: str) -> list[str]:
    """Of every process of the machine that this user may read, other than this one."""
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if containing in line:
            found.append(line)
    return found


@pytest.mark.timeout(180)
def test_serve_tells_nobody_the_private_server_s_password() -> None:
    """Neither a process that `furrow serve` starts, nor what it prints, nor the parts' logs, nor the server's log."""
    with serving_farm("demo", "--keys", FURROW_LOG_LEVEL="debug", FURROW_STANDBY="0") as farm:
        password = password_in(farm.redis_url)
        assert password is not None and len(password) >= 32
        assert command_lines(password) == []
        environments = [psutil.Process(pid).environ() for pid in farm.processes()]
        assert any("FURROW_REDIS_URL" in environment for environment in environments)
        api = next(pid for pid in farm.processes() if "api" in psutil.Process(pid).cmdline())
        assert password not in str(psutil.Process(api).environ())
        folder = farm.log.parent / "data"
        listed = furrow("models", "list", "--redis", str(folder))
        assert listed.returncode == 0 and "demo" in listed.stdout, listed.stderr
        assert password not in listed.stdout + listed.stderr
        said = farm.log.read_text() + (folder / "server.log").read_text()
        assert password not in said
        assert f"furrow keys create --redis {folder.resolve()}" in said


def test_a_password_that_a_user_gives_is_hidden_and_not_passed_on() -> None:
    """A process overwrites the password on its own command line, warns, and gives it to no child."""
    url = f"redis://:{SECRET}@127.0.0.1:1/0"
    for verb in (["worker"], ["api", "--port", "0"], ["models", "list"]):
        process = subprocess.Popen(
            [sys.executable, "-m", "ops.cli", *verb, "--redis", url],
            env=clean_environment(FURROW_REDIS_WAIT="30"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        try:
            said = ""
            while "waiting for Redis" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            if sys.platform == "linux":
                assert command_lines(SECRET) == []
            assert said.count("password of --redis was on the command line") == 1, said
            assert SECRET not in said
        finally:
            process.kill()
            process.communicate()


def test_a_path_names_a_server(tmp_path: Path) -> None:
    """A private server's folder while it runs, or a file with a URL; other paths are refused by name."""
    folder = tmp_path / "data"
    with EmbeddedServer(folder) as url:
        assert redis_url(str(folder)) == url == redis_url(str(folder / "url"))
        assert (folder / "port").read_text() in url
    with pytest.raises(SettingsError, match=f"{folder}: no private server runs"):
        redis_url(str(folder))
    with pytest.raises(SettingsError, match="no such file"):
        redis_url(str(tmp_path / "typo"))
    other = tmp_path / "other"
    other.write_text("hello")
    with pytest.raises(SettingsError, match="holds no URL"):
        redis_url(str(other))
    other.write_text("redis://host:1/0\n")
    assert redis_url(str(other)) == "redis://host:1/0" == redis_url("redis://host:1/0")
    assert redis_reference("redis://host:1/0") == "redis://host:1/0"
    assert Path(redis_reference("some/where")).is_absolute()
    began = time.monotonic()
    ended = furrow("models", "list", "--redis", str(folder))
    assert ended.returncode == 1 and "no private server runs on that folder" in ended.stderr
    assert "Traceback" not in ended.stderr and time.monotonic() - began < 60


def test_password_in_finds_the_password_of_a_url() -> None:
    """As they stand in the text, so that they can be found in a command line."""
    assert password_in("redis://:a%20b@h:1/0") == "a%20b"
    assert password_in("redis+cluster://u:p:q@h:1,i:2") == "p:q"
    assert password_in("unix://:s@/tmp/x") == "s"
    assert password_in("redis://h:1/0") is None and password_in("redis://user@h:1/0") is None
    assert password_in("/a/folder") is None
