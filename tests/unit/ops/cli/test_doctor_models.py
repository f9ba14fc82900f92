"""The doctor's checks of models."""

from __future__ import annotations

import pytest

from control.engines import ENGINES
from control.operations.checks.findings import Checks
from control.records.backend import Backend
from control.replicas.model_overviews import Overview, ReplicaOverview
from ops.cli.doctor.models import check_engine_versions, check_weights


def replica(name: str, weights: str, revision: int = 1, engine_version: str = "") -> ReplicaOverview:
    backend = Backend(
        weights=weights,
        dtype="float32",
        quant=None,
        dequantize=False,
        tp=1,
        collective="",
        kernels=["c++"],
        batch_invariant=True,
        engine_version=engine_version,
    )
    return ReplicaOverview(name, revision, "loaded", "", "h", ["cpu"], 1, 0, [], backend)


def overview(*replicas: ReplicaOverview) -> Overview:
    return Overview("m", "loaded", "", 0, 1, len(replicas), len(replicas), None, list(replicas))


def checked(*replicas: ReplicaOverview) -> Checks:
    checks = Checks("models", "m")
    check_weights(overview(*replicas), checks)
    return checks


def test_replicas_with_other_weights_are_found() -> None:
    """Files that were replaced under a model: a replica that was restarted loads the new ones."""
    (finding,) = checked(replica("r0", "aa"), replica("r1", "bb")).findings
    assert (finding.level, finding.check) == ("error", "weights")
    assert "r0: aa, r1: bb" in finding.message and "furrow models reload m" in finding.remedy


def test_a_rollout_is_no_such_finding() -> None:
    assert not checked(replica("r0", "aa"), replica("r1", "aa"), replica("r2", "bb", revision=2)).findings


@pytest.mark.parametrize(
    ("engine", "version", "level"),
    [
        ("vllm", "0.32.1", "ok"),
        ("vllm", "0.40.0", "warning"),
        ("vllm", "", "warning"),
        ("sglang", "0.6.0", "warning"),
        ("llama-server", "b1-0c1e570", "ok"),
    ],
)
def test_an_engine_of_another_version_than_the_tried_one_is_a_warning(engine: str, version: str, level: str) -> None:
    checks = Checks("models", "m")
    check_engine_versions(engine, overview(replica("r0", "aa", engine_version=version)), checks)
    (finding,) = checks.findings
    assert (finding.level, finding.check) == (level, "engine")
    assert version in finding.message and ENGINES[engine].title in finding.message


def test_furrows_own_engine_has_no_version_of_its_own() -> None:
    checks = Checks("models", "m")
    check_engine_versions("furrow", overview(replica("r0", "aa")), checks)
    assert not checks.findings
