"""`furrow doctor` finds what is wrong with Redis: a real server is broken in one way, the finding is read, and its
remedy is followed."""

from __future__ import annotations

import json
import re
import shlex
import socketserver
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from control import keys
from control.errors import ArgumentsRefused, KeyDamaged, RedisDenied
from control.keys import ModelKeys, ReplicaKeys
from control.operations.checks.findings import Checks, Finding
from control.operations.checks.redis_server import (
    check_clients,
    check_memory,
    check_mode,
    check_persistence,
    check_role,
    check_round_trip,
    check_version,
)
from control.operations.checks.report import read_redis
from control.redis.clients import SyncRedis
from control.redis.connection import connect, read, read_streams, run, write
from control.redis.servers import RoundTrip
from control.replicas.lease import acquire
from control.scripts import SCRIPTS
from ops.cli.doctor.doctor import doctor, examine
from ops.cli.doctor.redis_server import PROBES
from tests.integration.ops.cli.tls_front import certificate, tls_front
from tests.servers import NEW, OLD, Server, serving
from tests.waiting import until

ROOT = Path(__file__).parents[4]
SECRET = "geheim-7"


@pytest.fixture(scope="module", params=[OLD, NEW], ids=["old", "new"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving(request.param, "appendonly yes") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[SyncRedis]:
    with connect(server.url) as connected:
        connected.flushall()
        yield connected


def found(url: str, check: str) -> Finding:
    """The only finding of a check of Redis."""
    [one] = [one for one in examine(url, None) if (one.subject, one.check) == ("redis", check)]
    assert bool(one.remedy) == (one.level != "ok")
    return one


def follow(client: SyncRedis, finding: Finding) -> None:
    """Run the `redis-cli` commands of a remedy as they stand."""
    commands = re.findall(r"`redis-cli (.*?)`", finding.remedy)
    assert commands, finding
    for command in commands:
        if command != "ACL SAVE":  # these servers have no ACL file
            client.execute_command(*shlex.split(command))


def test_a_fit_server_has_no_finding(server: Server, client: SyncRedis) -> None:
    """Its kind and version are told; the check of rights leaves no key behind."""
    findings = [one for one in examine(server.url, None) if one.subject == "redis"]
    assert {one.level for one in findings if one.check != "round trip"} == {"ok"}  # a busy machine is slow
    assert {"version", "eviction", "persistence", "memory", "round trip", "rights"} == {one.check for one in findings}
    version = found(server.url, "version").message
    assert version.startswith("Valkey 9" if server.binary == NEW else "Redis 6.2")
    assert client.dbsize() == 0


def test_an_evicting_server(server: Server, client: SyncRedis) -> None:
    """A warning, and with maxmemory an error; the remedy mends it."""
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        assert found(server.url, "eviction").level == "warning"
        client.config_set("maxmemory", "1gb")
        finding = found(server.url, "eviction")
        assert finding.level == "error" and "allkeys-lru" in finding.message
        follow(client, finding)
        assert found(server.url, "eviction").level == "ok"
    finally:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "0")


def test_a_server_that_keeps_nothing(server: Server, client: SyncRedis) -> None:
    """Without the append-only file; the remedy mends it."""
    client.config_set("appendonly", "no")
    finding = found(server.url, "persistence")
    assert finding.level == "warning"
    follow(client, finding)
    assert found(server.url, "persistence").level == "ok"


@pytest.mark.parametrize(
    ("answer", "words", "command"),
    [
        (b"-BUSY Redis is busy running a script. You can only call SCRIPT KILL.\r\n", "a script", "SCRIPT KILL"),
        (b"", "does not answer", "kill -CONT"),
        (b"-ERR this is another server\r\n", "refuses the first commands", "log"),
    ],
)
def test_a_server_that_does_not_serve(answer: bytes, words: str, command: str) -> None:
    """A script of another program that does not end, a server that is stopped, and a refusal."""

    class Busy(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while self.request.recv(1024):
                self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Busy) as busy:
        busy.daemon_threads = True
        threading.Thread(target=busy.serve_forever, args=(0.01,)).start()
        finding = found(f"redis://127.0.0.1:{busy.server_address[1]}/0", "connection")
        busy.shutdown()
    assert finding.level == "error" and words in finding.message and command in finding.remedy


def test_a_server_that_wants_replicas(server: Server, client: SyncRedis) -> None:
    """It refuses every write, so that no host and no API process seems to be there: one finding, and its remedy."""
    client.config_set("min-replicas-to-write", 1)
    assert [one.check for one in read_redis(client)[1]] == ["writes"]
    [finding] = [one for one in examine(server.url, None) if one.level == "error"]
    assert finding.check == "writes" and "NOREPLICAS" in finding.message
    follow(client, finding)
    assert found(server.url, "rights").level == "ok"
    assert read_redis(client)[1] == []


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (keys.MODELS, "set"),
        (ModelKeys("m").bell, "stream"),
        (ModelKeys("m").load, "hash"),
        (ModelKeys("m").queue("normal", "t"), "stream"),
        (ReplicaKeys("m", "r0").lock, "string"),
        (keys.assignments("h"), "hash"),
    ],
)
def test_a_key_that_another_program_has_written(server: Server, client: SyncRedis, key: str, kind: str) -> None:
    """Its name, and the command that deletes it; nothing else can be judged then."""
    client.sadd(keys.MODELS, "m")
    client.sadd(keys.HOSTS, "h")
    client.hset(ModelKeys("m").replicas, "r0", '{"revision": 1, "tp": 1}')
    client.zadd(ModelKeys("m").served("normal"), {"t": 1})
    client.delete(key)
    client.zadd(key, {"rubbish": 1})
    [finding] = [one for one in examine(server.url, None) if one.check == "key"]
    assert finding.level == "error" and f"{key} is a zset and not a {kind}" in finding.message
    client.execute_command(*shlex.split(re.findall(r"`redis-cli (.*?)`", finding.remedy)[0]))
    assert not [one for one in examine(server.url, None) if one.check == "key"]


def test_callers_wait_for_a_key_that_another_program_has_written(server: Server, client: SyncRedis) -> None:
    """As for a Redis that is away: a read, a stream, and a script before it writes. A wrong argument is none."""
    of = ModelKeys("m")
    client.set(of.bell, "rubbish")
    client.set(of.load, "rubbish")
    for attempt in (
        lambda: run(client, read("HGETALL", of.load, parse=dict)),
        lambda: read_streams(client, {of.bell: "0"}, 1),
        lambda: run(client, acquire("m", "r0", "owner", 1)),
    ):
        with pytest.raises(KeyDamaged, match=r"furrow:\{m\}:(load|bell) .*furrow doctor"):
            attempt()
    with pytest.raises(ArgumentsRefused):
        run(client, acquire("n", "r0", "", 1))


def test_a_full_server(server: Server, client: SyncRedis) -> None:
    """More than maxmemory is used: an error, though scripts still answer."""
    client.config_set("maxmemory", "100kb")
    try:
        assert found(server.url, "memory").level == "error"
        assert found(server.url, "rights").level == "ok"
    finally:
        client.config_set("maxmemory", "0")


def test_a_user_without_rights(server: Server, client: SyncRedis) -> None:
    """Commands, keys and channels that are missing are named; the remedy gives exactly these. No password."""
    limited = ("on", f">{SECRET}", "resetkeys", "resetchannels", "+@all", "-xadd", "-publish", "-info", "-evalsha")
    client.execute_command("ACL", "SETUSER", "farm", *limited)
    url = f"unix://farm:{SECRET}@{server.socket}"
    said: list[str] = []
    for _ in range(4):  # without keys the script that tries commands is refused as a whole
        finding = found(url, "rights")
        said.append(finding.message)
        if finding.level == "ok":
            break
        assert finding.level == "error"
        follow(client, finding)
    assert found(url, "rights").level == "ok"
    assert "furrow:*" in said[0] and any("xadd" in text and "publish" in text for text in said)
    for words in ((), ("--json",)):
        assert SECRET not in CliRunner().invoke(doctor, [*words], env={"REDIS_URL": url}).output


def test_a_right_that_is_taken_from_a_farm(server: Server, client: SyncRedis) -> None:
    """Callers wait as for a Redis that is away, with the remedy; the doctor judges no host by what can't be written."""
    client.execute_command("ACL", "SETUSER", "farm", "on", f">{SECRET}", "~*", "&*", "+@all", "-evalsha", "-xread")
    url = f"unix://farm:{SECRET}@{server.socket}"
    with closing(connect(url)) as farm_user:
        with pytest.raises(RedisDenied, match=r"'evalsha'.*furrow doctor"):
            run(farm_user, write("SET", "furrow:text", "1", parse=bool))
        with pytest.raises(RedisDenied, match=r"'xread'.*furrow doctor"):
            read_streams(farm_user, {"furrow:none": "0"}, 1)
    findings = examine(url, None)
    assert [one.check for one in findings if one.level == "error"] == ["rights"]
    follow(client, next(one for one in findings if one.check == "rights"))
    assert found(url, "rights").level == "ok"


def test_a_user_without_info_is_a_warning(server: Server, client: SyncRedis) -> None:
    """The farm runs without it."""
    client.execute_command(
        "ACL", "SETUSER", "blind", "on", f">{SECRET}", "resetchannels", "~furrow:*", "&furrow:*", "+@all", "-info"
    )
    assert found(f"unix://blind:{SECRET}@{server.socket}", "rights").level == "warning"


def test_a_user_that_may_do_nothing(server: Server, client: SyncRedis) -> None:
    """Not even PING; one finding says so."""
    client.execute_command("ACL", "SETUSER", "nobody", "on", f">{SECRET}", "-@all")
    finding = found(f"unix://nobody:{SECRET}@{server.socket}", "rights")
    assert finding.level == "error" and "SETUSER nobody" in finding.remedy


def test_a_wrong_password_and_a_server_that_is_away(server: Server, client: SyncRedis, tmp_path: Path) -> None:
    """An error each, with status 2 and without the password; hosts and models are not judged."""
    client.execute_command("ACL", "SETUSER", "farm", "on", f">{SECRET}")
    for url in (f"unix://farm:wrong-{SECRET}@{server.socket}", f"unix://farm:{SECRET}@{tmp_path}/none"):
        ended = CliRunner().invoke(doctor, ["--json"], env={"REDIS_URL": url})
        report = json.loads(ended.output)
        assert ended.exit_code == 2 and SECRET not in ended.output
        assert [one["check"] for one in report["findings"]] == ["connection"]


def test_no_redis_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 2, and the ways to name one."""
    ended = CliRunner().invoke(doctor, [], env={"REDIS_URL": "", "FURROW_REDIS_URL": ""})
    assert ended.exit_code == 2 and "REDIS_URL" in ended.output
    ended = CliRunner().invoke(doctor, ["--redis", f"redis://:{SECRET}@:x/"])
    assert ended.exit_code == 2 and SECRET not in ended.output.replace(f"://:{SECRET}@:x/", "", 0)


@pytest.mark.parametrize(
    ("days", "level", "words"),
    [(-3, "error", "expired on"), (5, "warning", "expires on"), (90, "ok", "valid for 89 days")],
)
def test_the_certificate_of_a_server(new_server: Server, tmp_path: Path, days: int, level: str, words: str) -> None:
    """Expired, about to expire, and fit, by a TLS front before a real server."""
    authority = certificate(tmp_path, days)
    with tls_front(new_server.socket, tmp_path) as port:
        url = f"rediss://localhost:{port}/0?ssl_ca_certs={authority}"
        findings = [one for one in examine(url, None) if one.subject == "redis"]
    [finding] = [one for one in findings if one.check == "certificate"]
    assert (finding.level, words in finding.message) == (level, True)
    assert ("connection" in {one.check for one in findings}) == (level == "error")


def test_a_certificate_that_is_not_trusted(new_server: Server, tmp_path: Path) -> None:
    """It is fit, but no authority of this host has signed it; the remedy names the option."""
    certificate(tmp_path, 90)
    with tls_front(new_server.socket, tmp_path) as port:
        finding = found(f"rediss://localhost:{port}/0", "certificate")
        assert finding.level == "error" and "ssl_ca_certs" in finding.remedy
        for file in ("missing", "key.pem"):
            finding = found(f"rediss://localhost:{port}/0?ssl_ca_certs={tmp_path}/{file}", "certificate")
            assert finding.level == "error" and "can't be read" in finding.message


def test_a_server_without_tls(server: Server, tmp_path: Path) -> None:
    """rediss:// to a port that speaks plain text, and to one where nothing is."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Plain) as plain:
        threading.Thread(target=plain.serve_forever, args=(0.01,)).start()
        url = f"rediss://127.0.0.1:{plain.server_address[1]}/0"
        assert found(url, "certificate").level == "error"
        plain.shutdown()
    assert [one.check for one in examine(url, None)] == ["connection"]


class Plain(socketserver.BaseRequestHandler):
    """Answers as a server without TLS does to a TLS client."""

    def handle(self) -> None:
        self.request.recv(1024)
        self.request.sendall(b"-ERR unknown command\r\n")


def level_of(check: object, told: object) -> str:
    checks = Checks("redis")
    check(told, checks)  # type: ignore[operator]
    return checks.findings[-1].level if checks.findings else "ok"


def in_a_farm_of_one(info: dict[str, object], checks: Checks) -> None:
    check_mode(info, False, checks)


@pytest.mark.parametrize(
    ("check", "info", "level"),
    [
        (check_version, {"redis_version": "6.0.16"}, "error"),
        (check_version, {"redis_version": "7.2.4", "server_name": "valkey"}, "ok"),
        (check_version, {"redis_version": "7.4.0", "dragonfly_version": "df-1.30"}, "warning"),
        (check_role, {"role": "slave", "master_host": "h", "master_port": 1}, "error"),
        (in_a_farm_of_one, {"redis_mode": "sentinel"}, "error"),
        (in_a_farm_of_one, {"redis_mode": "cluster"}, "error"),
        (in_a_farm_of_one, {"redis_mode": "standalone"}, "ok"),
        (check_role, {"role": "master"}, "ok"),
        (check_persistence, {"aof_enabled": 1, "aof_last_write_status": "err"}, "error"),
        (check_persistence, {"aof_enabled": 1, "rdb_last_bgsave_status": "err"}, "error"),
        (check_memory, {"used_memory": 95, "maxmemory": 100}, "warning"),
        (check_memory, {"used_memory": 60, "total_system_memory": 100}, "warning"),
        (check_memory, {"used_memory": 40, "total_system_memory": 100}, "ok"),
        (check_clients, {"connected_clients": 90, "maxclients": 100}, "warning"),
        (check_clients, {"connected_clients": 9, "maxclients": 100}, "ok"),
    ],
)
def test_a_reading_of_info(check: object, info: dict[str, object], level: str) -> None:
    """States that are hard to bring a server into."""
    assert level_of(check, info) == level


@pytest.mark.parametrize(("ms", "level"), [(0.2, "ok"), (20.0, "warning"), (300.0, "error")])
def test_a_slow_network(ms: float, level: str) -> None:
    """By the fastest of a few round trips."""
    assert level_of(check_round_trip, RoundTrip(ms, 0, 0)) == level


def test_every_command_that_furrow_sends_is_tried() -> None:
    """Those of the scripts, and those that Python sends."""
    scripts = "".join(script.text for script in SCRIPTS.values())
    sent = set(re.findall(r"redis\.p?call\(['\"]([A-Z]+)['\"]", scripts))
    for part in ("control", "worker", "api"):
        for path in (ROOT / part).rglob("*.py"):
            sent |= set(re.findall(r"\b(?:read|write)\(\s*\"([A-Z]+)\"", path.read_text()))
    assert len(sent) > 40
    # EVAL runs the probes, and INFO is tried for itself: the farm runs without it.
    assert sent - set(PROBES) - {"EVAL", "INFO"} == set()


def test_a_replica_is_one_finding() -> None:
    """All else that goes wrong on a server that takes no writes follows from it."""
    with serving(NEW, "appendonly yes") as server, connect(server.url) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        [finding] = [one for one in examine(server.url, None) if one.level != "ok"]
        assert finding.check == "role" and "127.0.0.1:1" in finding.remedy and "REPLICAOF NO ONE" in finding.remedy
        client.execute_command("REPLICAOF", "NO", "ONE")
        assert not [one for one in examine(server.url, None) if one.check == "role" and one.level != "ok"]


@pytest.mark.parametrize("binary", [OLD, NEW], ids=["old", "new"])
def test_a_server_near_or_at_its_most_clients(binary: Path) -> None:
    """Near it, a warning; at it, the doctor itself gets no connection, and says why."""
    with serving(binary, "appendonly yes") as server, connect(server.url) as client:
        client.config_set("maxclients", 4)
        others = [connect(server.url) for _ in range(2)]
        assert all(other.ping() for other in others)
        near = found(server.url, "clients")
        assert near.level == "warning" and "of at most 4 clients" in near.message
        until(lambda: client.info("clients")["connected_clients"] == 3)  # the doctor's own connections have ended
        more = connect(server.url)
        assert more.ping()
        full = found(server.url, "connection")
        assert full.level == "error" and "maxclients" in full.message and "CONFIG SET maxclients" in full.remedy
        for other in (more, *others):
            other.close()
