"""An agent publishes facts about its host: against a real server, real files and real sockets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from control.messages import Assignment, ModelSpec
from control.placement import farm, membership
from control.placement.membership import HostFacts, facts_of
from control.placement.placement import Host
from control.records import catalog
from control.version import VERSION
from tests.integration.worker.conftest import ReplicaRedis
from worker.agent import facts
from worker.agent.facts import FactsPublisher, ModelFingerprints

SPEC = ModelSpec(name="m", source="/nowhere", tp=2)


@pytest.fixture
def publishers(redis: ReplicaRedis) -> Iterator[tuple[FactsPublisher, FactsPublisher]]:
    """The publishers of two hosts, alpha and beta."""
    pair = FactsPublisher(redis.client, "alpha", dict), FactsPublisher(redis.client, "beta", dict)
    yield pair
    for one in pair:
        one._probe.close()


def published(redis: ReplicaRedis, host: str) -> HostFacts:
    facts = redis.run(facts_of(host))
    assert facts is not None
    return facts


def part(host: str, rank: int, redis: ReplicaRedis) -> None:
    membership.beat_host(redis.client, Host(host, ()), pid=1, memory_bytes=1)
    farm.assign(redis.client, host, Assignment(spec=SPEC, replica="r0", ranks=[rank], devices=["cpu"]))


def test_a_host_tells_version_clock_disks_and_compiler(
    redis: ReplicaRedis, publishers: tuple[FactsPublisher, Any]
) -> None:
    """The same machine as the server: no skew. They lapse when the agent is away for long."""
    publishers[0].publish()
    facts = published(redis, "alpha")
    assert facts.version == VERSION and abs(facts.clock_ms) < 1_000 and 0 < facts.round_trip_ms < 1_000
    for place in (facts.models, facts.cache):
        assert place is not None and 0 < place.free <= place.total
    assert (facts.shared_memory is not None) == Path("/dev/shm").is_dir()
    assert facts.ports == {} and facts.port == 0
    assert 0 < redis.client.pttl("furrow:host:alpha:facts") <= 90_000


def test_a_compiler_that_is_gone_or_fails_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CXX names it, as at a compilation."""
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert facts.compiler() == ""
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\nexit 1\n")
    fails.chmod(0o755)
    monkeypatch.setenv("CXX", str(fails))
    assert facts.compiler() == ""
    works = tmp_path / "works"
    works.write_text("#!/bin/sh\necho 'g++ 12.2'\necho more\n")
    works.chmod(0o755)
    monkeypatch.setenv("CXX", str(works))
    assert facts.compiler() == f"{works}: g++ 12.2"


def test_a_file_system_that_does_not_answer_has_no_space(tmp_path: Path) -> None:
    """One whose folder is not made yet is that of its parent."""

    def fails(path: Path) -> os.statvfs_result:
        raise OSError(5, "Input/output error")

    assert facts.space(tmp_path / "not" / "yet") is not None
    assert facts.space(tmp_path, fails) is None


def test_kernels_that_are_switched_off_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert facts.kernels_off() == []
    monkeypatch.setenv("FURROW_DISABLE", "cpp, graphs")
    assert facts.kernels_off() == ["cpp: named in FURROW_DISABLE", "graphs: named in FURROW_DISABLE"]


def test_equal_files_have_equal_fingerprints(model: Path, tmp_path: Path) -> None:
    """Another value has another one, once the file has changed; missing files have their reason."""
    prints = ModelFingerprints()
    spec = ModelSpec(name="m", source=str(model))
    first = prints.of([spec])["m"]
    assert len(first.fingerprint) == 16 and prints.of([spec])["m"] is first
    save_file({"a": torch.ones(8)}, model / "model.safetensors")
    assert prints.of([spec])["m"].fingerprint not in ("", first.fingerprint)
    (model / "model.safetensors").unlink()
    assert "model.safetensors" in prints.of([spec])["m"].error
    assert "does not exist" in prints.of([ModelSpec(name="m", source=str(tmp_path / "none"))])["m"].error
    assert prints.of([ModelSpec(name="m", source="org/not-downloaded")]) == {}


def test_an_agent_publishes_the_fingerprints_of_all_models(
    redis: ReplicaRedis, publishers: tuple[FactsPublisher, Any], model: Path
) -> None:
    """Also of those that the host does not run: it may have to."""
    catalog.put_spec(redis.client, ModelSpec(name="m", source=str(model)))
    publishers[0].publish()
    assert len(published(redis, "alpha").files["m"].fingerprint) == 16


def test_hosts_of_one_group_try_each_other(
    redis: ReplicaRedis, publishers: tuple[FactsPublisher, FactsPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connects to a port of the other one, and tells where it can't."""
    alpha, beta = publishers
    monkeypatch.setenv("FURROW_ADDRESS", "127.0.0.1")
    for rank, host in enumerate(("alpha", "beta")):
        part(host, rank, redis)
    alpha.publish()
    beta.publish()
    assert published(redis, "beta").ports == {"alpha": ""} and published(redis, "beta").port > 0
    alpha._probe.close()
    monkeypatch.setattr(alpha._probe, "open", lambda address: None)  # as behind a packet filter
    beta.publish()
    assert "refused" in published(redis, "beta").ports["alpha"]


def test_an_address_that_the_host_does_not_have_is_told(
    redis: ReplicaRedis, publishers: tuple[FactsPublisher, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks could not listen on it either."""
    monkeypatch.setenv("FURROW_ADDRESS", "192.0.2.1")
    part("alpha", 0, redis)
    publishers[0].publish()
    assert published(redis, "alpha").ports["alpha"].startswith("192.0.2.1: ")


def test_a_listener_closes_connections_and_ends() -> None:
    """It reads nothing of what others send."""
    probe = facts.PortProbe()
    probe.open("127.0.0.1")
    endpoint = probe.endpoint
    assert endpoint is not None
    assert facts.connect_to({"a": endpoint}) == {"a": ""}
    probe.close()
    assert facts.connect_to({"a": endpoint})["a"] != ""
