"""`furrow doctor` over a farm and over an API behind a proxy."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest
from click.testing import CliRunner

from api.models.farm import read_farm
from control.keys import ReplicaKeys
from control.messages import ModelSpec
from control.operations.checks.findings import Checks, Finding
from control.operations.checks.hosts import check_files
from control.placement import farm, membership
from control.placement.farm import HostCard
from control.placement.membership import FilesHere, facts_of, put_facts
from control.placement.placement import Host
from control.records import catalog
from control.records.backend import Backend, put_backend
from control.redis.connection import connect, run
from control.replicas import health, lease
from control.version import VERSION
from ops.cli.doctor.doctor import doctor, examine
from tests.integration.ops.cli.tls_front import certificate
from tests.integration.ops.populated import FACTS, HOST, MODEL, Populated, populate
from tests.servers import Server
from worker.agent.rank_exits import OUT_OF_MEMORY

BACKEND = Backend(
    weights="0123456789abcdef",
    dtype="float32",
    quant=None,
    dequantize=False,
    tp=2,
    collective="shared memory",
    kernels=["C++"],
    batch_invariant=True,
)


@pytest.fixture
def populated(new_server: Server) -> Iterator[Populated]:
    with connect(new_server.url) as client:
        client.flushall()
        yield populate(client, new_server.url)


def findings(server: Server, subject: str) -> dict[str, Finding]:
    """The first that is not ok of each check."""
    host_findings = [one for one in examine(server.url, None) if one.subject == subject and one.level != "ok"]
    return {one.check: one for one in reversed(host_findings)}


@pytest.mark.parametrize(("state", "then"), [("failed", "furrow models reload"), ("backoff", "third such end")])
def test_a_lack_of_memory_has_its_own_remedy(populated: Populated, new_server: Server, state: Any, then: str) -> None:
    """Not to wait: the same models would kill each other again."""
    run(populated.client, lease.release_token(MODEL, "r0", str(run(populated.client, lease.holder(MODEL, "r0")))))
    populated.client.delete(ReplicaKeys(MODEL, "r0").poison)
    health.write_status(populated.client, MODEL, "r0", state, f"killed by SIGKILL: {OUT_OF_MEMORY}")
    finding = findings(new_server, "models")["replicas"]
    assert "--kv-tokens" in finding.remedy and then in finding.remedy and "Wait" not in finding.remedy


def test_models_of_a_farm_in_trouble(populated: Populated, new_server: Server) -> None:
    """A poisoned replica and a dead letter, each with its command."""
    findings_by_check = findings(new_server, "models")
    assert findings_by_check["replicas"].level == "warning" and findings_by_check["replicas"].where == MODEL
    assert "furrow dead list demo" in findings_by_check["dead letters"].remedy
    ended = CliRunner().invoke(doctor, ["--json", "--redis", new_server.url])
    report = json.loads(ended.output)
    assert (ended.exit_code, report["level"]) == (1, "warning")
    assert set(report["findings"][0]) == {"subject", "check", "level", "where", "message", "remedy"}
    text = CliRunner().invoke(doctor, ["--redis", new_server.url]).output
    assert all(one.remedy in text for one in findings_by_check.values())


def test_a_replica_without_a_place_and_one_that_was_given_up(populated: Populated, new_server: Server) -> None:
    """Errors with the agents' reasons; a paused model is told."""
    health.write_status(populated.client, MODEL, "r0", "unplaceable", "no host has 2 devices of cuda")
    finding = findings(new_server, "models")["replicas"]
    assert finding.level == "error" and "no host has 2 devices" in finding.message and "rebalance" not in finding.remedy
    health.write_status(populated.client, MODEL, "r0", "unplaceable", "it needs 2 GiB of memory; a has 1 GiB left")
    finding = findings(new_server, "models")["replicas"]
    assert "it needs 2 GiB of memory" in finding.message and "furrow models rebalance --dry-run" in finding.remedy
    health.write_status(populated.client, MODEL, "r0", "failed", "the folder is gone")
    finding = findings(new_server, "models")["replicas"]
    assert "the folder is gone" in finding.message and "furrow models reload demo" in finding.remedy
    spec = catalog.get_spec(populated.client, MODEL)
    assert spec is not None
    catalog.put_spec(populated.client, msgspec.structs.replace(spec, paused=True))
    assert "furrow models resume demo" in findings(new_server, "models")["paused"].remedy


def test_files_that_differ_between_hosts(populated: Populated, new_server: Server) -> None:
    """An error where both run the model, a warning where a replica might move; missing files likewise."""
    client = populated.client

    def shown() -> list[str]:  # in the console
        return [one.level for one in read_farm(client).findings if one.check == "files"]

    def beta(**files: str) -> None:
        membership.beat_host(client, Host("beta", ()), pid=1, memory_bytes=1)
        run(client, put_facts("beta", msgspec.structs.replace(FACTS, files={MODEL: FilesHere(**files)})))
        client.persist("furrow:host:beta")

    beta(fingerprint="another")
    finding = findings(new_server, "models")["files"]
    assert finding.level == "warning" and "another: beta" in finding.message
    given = msgspec.structs.replace(farm.assignments(client, HOST)[0], replica="r1")
    farm.assign(client, "beta", given)
    assert findings(new_server, "models")["files"].level == "error"
    beta(error="Model folder somewhere/demo does not exist")
    finding = findings(new_server, "models")["files"]
    assert finding.level == "error" and "beta" in finding.remedy and shown() == ["error"]
    health.write_status(client, MODEL, "r0", "failed", "Model folder somewhere/demo does not exist")
    assert "files" not in findings(new_server, "models") and not shown()  # the replica's reason says it already
    beta(fingerprint=FACTS.files[MODEL].fingerprint)
    assert "files" not in findings(new_server, "models")


def test_files_are_compared_on_hosts_of_the_newest_version() -> None:
    """Versions are compared by their numbers: 0.10 is newer than 0.9."""
    versions = {"old": ("0.9.0+a", "former"), "first": ("0.10.0+b", "one"), "second": ("0.10.0+b", "two")}
    cards = [
        HostCard(id=name, alive=True, drained=False, version=None, devices=[], engines=[], replicas=[])
        for name in versions
    ]
    facts = {
        name: msgspec.structs.replace(FACTS, version=version, files={MODEL: FilesHere(fingerprint=fingerprint)})
        for name, (version, fingerprint) in versions.items()
    }
    checks = Checks("models", MODEL)
    check_files(ModelSpec(name=MODEL, source="somewhere/demo"), cards, facts, checks, set())
    [finding] = checks.findings
    assert finding.level == "warning" and "(one: first; two: second)" in finding.message


def test_replicas_that_compute_differently(populated: Populated, new_server: Server) -> None:
    """The kernels that each chose are told; where they differ it is a warning."""
    client = populated.client
    run(client, catalog.put_replica(MODEL, "r0", catalog.Assigned(revision=1, tp=2)))
    run(client, catalog.put_replica(MODEL, "r1", catalog.Assigned(revision=1, tp=2)))
    for replica, kernels in (("r0", ["C++"]), ("r1", ["torch"])):
        run(client, put_backend(MODEL, replica, msgspec.structs.replace(BACKEND, kernels=kernels)))
    finding = findings(new_server, "models")["kernels"]
    assert "C++" in finding.message and "torch" in finding.message
    run(client, put_backend(MODEL, "r1", BACKEND))
    assert "kernels" not in findings(new_server, "models")


def test_repeated_faults_are_told(populated: Populated, new_server: Server) -> None:
    """Three within an hour, though each was repaired."""
    key = populated.lease.keys.poisons
    now = int(time.time() * 1000)
    for number in range(3):
        fields = {"epoch": now + number, "rank": 1, "kind": "exited", "message": "rank 1 (pid 7) killed by SIGKILL"}
        populated.client.xadd(key, fields)  # type: ignore[arg-type]
    finding = findings(new_server, "models")["faults"]
    assert "3 faults" in finding.message and "dmesg" in finding.remedy and "--kv-tokens" in finding.remedy


def test_a_host_of_another_version(populated: Populated, new_server: Server) -> None:
    """Its heartbeat tells it."""
    populated.client.hset(f"furrow:host:{HOST}", "version", "0.0.1")
    finding = findings(new_server, "hosts")["version"]
    assert f"0.0.1: host {HOST}" in finding.message and VERSION in finding.message


def test_ranks_of_another_build(populated: Populated, new_server: Server) -> None:
    """They keep theirs when the agent is replaced; the model to reload is named."""
    facts = run(populated.client, facts_of(HOST))
    assert facts is not None
    assert "ranks" not in findings(new_server, "hosts")
    old = msgspec.structs.replace(facts, old_ranks={f"{MODEL}:r0 rank 1": "0.0.1"})
    run(populated.client, put_facts(HOST, old))
    finding = findings(new_server, "hosts")["ranks"]
    assert f"{MODEL}:r0 rank 1 (0.0.1)" in finding.message and f"`furrow models reload {MODEL}`" in finding.remedy


def test_an_empty_farm(new_server: Server) -> None:
    """No host, no model, no API: each with the command that starts one."""
    with connect(new_server.url) as client:
        client.flushall()
    remedies = [one.remedy for one in examine(new_server.url, None) if one.subject != "redis" and one.remedy]
    assert len(remedies) == 3
    for command in ("furrow worker", "furrow api", "furrow models load"):
        assert any(command in remedy for remedy in remedies)


class Upstream(BaseHTTPRequestHandler):
    """The routes of an API that the doctor reads."""

    protocol_version = "HTTP/1.1"
    ready, version, pause_s, event = True, VERSION, 0.07, b""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health/stream" or self.path == "/v1/health/stream":
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            for _ in range(5):
                self.wfile.write(b": a comment\n\n")
                self.wfile.write(b"data: %s\n\n" % (self.event or b'{"at_ms":%d}' % int(time.time() * 1000)))
                self.wfile.flush()
                time.sleep(self.pause_s)
            return
        known = {
            "/v1/version": {"version": self.version},
            "/v1/ready": {"ready": self.ready, "reason": "no model is ready"},
        }
        self.answer(known.get(self.path))

    def answer(self, body: object) -> None:
        data = b"nothing here" if body is None else json.dumps(body).encode()
        self.send_response(404 if body is None else 200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serve(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def buffering(upstream: str) -> type[BaseHTTPRequestHandler]:
    """A proxy that passes an answer on once it is whole."""

    class Proxy(Upstream):
        def do_GET(self) -> None:
            with urlopen(upstream + self.path) as answer:
                data = answer.read()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Proxy


def of_api(url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.delenv("FURROW_REDIS_URL", raising=False)
    return {one.check: one for one in examine(None, url)}


def test_a_proxy_that_buffers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same API without it is fit, under each form of its address."""
    with serve(type("Quick", (Upstream,), {"pause_s": 0.0})) as url:
        for form in (url, f"{url}/v1", f"{url}/v1/", url.removeprefix("http://")):
            assert {one.level for one in of_api(form, monkeypatch).values()} == {"ok"}
    with serve(Upstream) as url, serve(buffering(url)) as proxy:
        assert of_api(url, monkeypatch)["stream"].level == "ok"
        api_findings = of_api(proxy, monkeypatch)
    assert api_findings["version"].level == api_findings["ready"].level == "ok"
    assert api_findings["stream"].level == "error" and "proxy_buffering off" in api_findings["stream"].remedy


def test_an_api_that_is_not_ready_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason is passed on."""
    handler = type("Unready", (Upstream,), {"ready": False, "version": "0.0.1", "pause_s": 0.02})
    with serve(handler) as url:
        api_findings = of_api(url, monkeypatch)
    assert api_findings["ready"].level == "error" and "no model is ready" in api_findings["ready"].message
    assert api_findings["version"].level == "warning" and "0.0.1" in api_findings["version"].message


def test_an_address_without_an_api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Something else, nothing, TLS where there is none, and no address; a password in it is not repeated."""
    with serve(BaseHTTPRequestHandler) as url:
        assert "not by Furrow" in of_api(url, monkeypatch)["answer"].message
        assert of_api(url.replace("http", "https"), monkeypatch)["certificate"].level == "error"
    api_findings = of_api(url.replace("//", "//user:geheim-7@"), monkeypatch)
    assert api_findings["answer"].level == "error" and "geheim" not in str(api_findings)
    for wrong in ("ftp://x", "http://[::1", "http://a..b", "http://x/\xfc"):
        assert of_api(wrong, monkeypatch)["connection"].level == "error"
    for unusable in ("http://☃.example:1", "http://xn--a.example:1", "http://h:1/\x7f", "http://h:1/" + 70_000 * "a"):
        assert "can't be used" in of_api(unusable, monkeypatch)["url"].message
    for event in (b'{"at":1}', b"[]", b"\xff", b'{"at_ms":"\xff"}'):
        with serve(type("Other", (Upstream,), {"event": event, "pause_s": 0.0})) as url:
            assert "not Furrow's" in of_api(url, monkeypatch)["answer"].message


def test_the_certificate_of_an_api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that has expired ends the check: no client connects."""
    import ssl

    certificate(tmp_path, -1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        api_findings = of_api(f"https://localhost:{server.server_port}", monkeypatch)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert list(api_findings) == ["certificate"] and "expired" in api_findings["certificate"].message
