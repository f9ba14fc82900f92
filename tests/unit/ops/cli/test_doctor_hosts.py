"""The doctor's checks of hosts: one fact is changed, and one finding tells it."""

from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from control.operations.checks.findings import Finding, report_of
from control.operations.checks.hosts import check_hosts
from control.placement.farm import HostCard
from control.placement.membership import ApiRecord, HostFacts, Space
from control.version import VERSION
from worker.agent.facts import space as space_of

GIB = 2**30


def space(free: int, total: int = 1000 * GIB) -> Space:
    return Space(path="/x", total=total, free=free)


FACTS = HostFacts(
    at_ms=1,
    version=VERSION,
    clock_ms=3,
    round_trip_ms=0.2,
    models=space(500 * GIB),
    cache=space(500 * GIB),
    shared_memory=space(8 * GIB),
    compiler="c++: 12.2",
    native="",
    kernels_off=[],
    files={},
)
CARD = HostCard(id="alpha", alive=True, drained=False, version=VERSION, devices=[], engines=[], replicas=["m:r0"])


def findings(
    card: dict[str, Any] | None = None, skew_ms: int = 0, apis: dict[str, str] | None = None, **facts: Any
) -> list[Finding]:
    """Those of two hosts, alpha being the one with the changes."""
    changed = msgspec.structs.replace(CARD, **(card or {}))
    other = msgspec.structs.replace(CARD, id="beta", replicas=[])
    told = {"alpha": msgspec.structs.replace(FACTS, **facts), "beta": FACTS}
    return check_hosts([changed, other], told, {"api-1": VERSION} if apis is None else apis, skew_ms)


def test_hosts_that_are_well() -> None:
    """All is told in lines without remedies."""
    assert {(one.level, one.remedy) for one in findings()} == {("ok", "")}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A full disk is another thing: deleting files would not help. The agent finds a file in the folder's place."""
    (tmp_path / "cache").write_text("")
    blocked, free = space_of(tmp_path / "cache" / "furrow"), space_of(tmp_path / "new")
    assert free is not None and free.unwritable == ""
    finding = next(one for one in findings(cache=blocked) if one.check == "cache" and one.level != "ok")
    assert finding.level == "error" and f"{tmp_path}/cache is no folder" in finding.message
    assert "XDG_CACHE_HOME" in finding.remedy and "cache clear" not in finding.remedy


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"card": {"version": "0.0.9"}}, "version", "warning", "0.0.9: host alpha"),
        ({"card": {"version": None}}, "version", "warning", "unknown: host alpha"),
        ({"apis": {"api-1": "0.0.9"}}, "version", "warning", "0.0.9: API api-1"),
        ({"apis": {}}, "api", "warning", "no API process"),
        ({"clock_ms": 9_000}, "clock", "warning", "alpha +9.0 s"),
        ({"skew_ms": -5_000}, "clock", "warning", "this command -5.0 s"),
        ({"models": space(5 * GIB)}, "models", "warning", "5 GiB free"),
        ({"models": space(GIB // 2)}, "models", "error", "512 MiB free"),
        ({"models": None}, "models", "error", "does not answer"),
        ({"cache": space(2**20)}, "cache", "error", "1 MiB free"),
        ({"shared_memory": None}, "shared memory", "warning", "no /dev/shm"),
        ({"shared_memory": space(2**26, 2**26)}, "shared memory", "warning", "64 MiB"),
        ({"shared_memory": space(2**20, 2**30)}, "shared memory", "error", "1 MiB"),
        ({"compiler": ""}, "compiler", "warning", "no C++ compiler that runs"),
        ({"native": "there is no C++ compiler"}, "compiler", "warning", "nothing is computed in C++"),
        ({"native": "this processor (x) has no avx2"}, "compiler", "warning", "avx2. CPUs run the reference in torch"),
        ({"kernels_off": ["triton.decode: differs"]}, "kernels", "warning", "triton.decode"),
        ({"ports": {"beta": "10.0.0.2:5: timed out"}}, "ports", "error", "timed out"),
        ({"ports": {"alpha": "10.0.0.1: no such address"}}, "ports", "error", "can't listen"),
        ({"card": {"alive": False}}, "alive", "warning", "its agent is away"),
    ],
)
def test_each_thing_that_is_wrong(changes: dict[str, Any], check: str, level: str, words: str) -> None:
    """One finding with its level, and a remedy."""
    wrong = [one for one in findings(**changes) if one.level != "ok"]
    assert [(one.check, one.level) for one in wrong] == [(check, level)]
    assert words in wrong[0].message and wrong[0].remedy
    assert report_of(wrong).level == level


def test_a_host_of_cpus_with_kernels_of_the_package_needs_no_compiler() -> None:
    """A GPU needs one all the same: Triton compiles with it."""

    def levels(devices: list[str]) -> list[str]:
        checked = findings({"devices": devices}, compiler="", brought="native-1-avx2")
        return [one.level for one in checked if one.check == "compiler"]

    assert levels(["cpu"]) == ["ok", "ok"] and levels(["cuda:0"]) == ["warning", "ok"]


def test_a_host_without_facts() -> None:
    """An agent of an older version, or one that has just started."""
    [wrong] = [one for one in check_hosts([CARD], {}, {"a": VERSION}, 0) if one.level != "ok"]
    assert (wrong.check, wrong.level) == ("facts", "warning")


def test_no_host_and_only_drained_ones() -> None:
    """Nothing can be served, or placed."""
    assert check_hosts([], {}, {"a": VERSION}, 0)[0].level == "error"
    drained = msgspec.structs.replace(CARD, drained=True)
    host_findings = [one for one in check_hosts([drained], {"alpha": FACTS}, {"a": VERSION}, 0) if one.level != "ok"]
    assert [(one.check, one.level) for one in host_findings] == [("drained", "error")] and "--undo" in host_findings[
        0
    ].remedy


def test_a_host_that_is_to_stay_away_is_no_finding() -> None:
    """The drain says so; without it the remedy names that."""
    gone = msgspec.structs.replace(CARD, id="gone", alive=False, replicas=[])
    host_findings = check_hosts([CARD, gone], {"alpha": FACTS, "gone": None}, {"a": VERSION}, 0)
    [wrong] = [one for one in host_findings if one.level != "ok"]
    assert (wrong.check, wrong.level) == ("alive", "warning") and "furrow drain gone" in wrong.remedy
    drained = msgspec.structs.replace(gone, drained=True)
    host_findings = check_hosts([CARD, drained], {"alpha": FACTS, "gone": None}, {"a": VERSION}, 0)
    assert {one.level for one in host_findings} == {"ok"}


def test_the_clock_of_redis_is_the_wrong_one() -> None:
    """All hosts differ from it by the same: one finding about its machine."""
    ahead = msgspec.structs.replace(FACTS, clock_ms=60_000)
    host_findings = check_hosts([CARD], {"alpha": ahead}, {"a": VERSION}, 60_100)
    [wrong] = [one for one in host_findings if one.level != "ok"]
    assert wrong.check == "clock" and "Redis' machine" in wrong.message and "-60.0 s" in wrong.message


@pytest.mark.parametrize(("reason", "words"), [("Redis at HOST can't be reached", "HOST can't be"), (None, "hangs")])
def test_an_api_process_that_is_cut_off_from_redis(reason: str | None, words: str) -> None:
    """It says so itself, so that nobody kills it; one that only takes connections hangs."""

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(msgspec.json.encode({"ready": False, "reason": reason, "models": []}))

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        record = ApiRecord(url=f"http://127.0.0.1:{server.server_port}", host=os.uname().nodename, pid=7, at_ms=1)
        host_findings = check_hosts([CARD], {"alpha": FACTS}, {"api-1": VERSION}, 0, [record])
        server.shutdown()
    [finding] = [one for one in host_findings if one.check == "api process"]
    assert finding.level == "error" and words in finding.message
    assert ("kill -9" in finding.remedy) == (reason is None)
