"""The doctor's checks of models."""

from __future__ import annotations

from control.operations.checks.findings import Checks
from control.records.backend import Backend
from control.replicas.health import Overview, ReplicaOverview
from ops.cli.doctor.models import check_weights


def replica(name: str, weights: str, revision: int = 1) -> ReplicaOverview:
    backend = Backend(
        weights=weights,
        dtype="float32",
        quant=None,
        dequantize=False,
        tp=1,
        collective="",
        kernels=["c++"],
        batch_invariant=True,
    )
    return ReplicaOverview(name, revision, "loaded", "", "h", ["cpu"], 1, 0, [], backend)


def checked(*replicas: ReplicaOverview) -> Checks:
    checks = Checks("models", "m")
    check_weights(Overview("m", "loaded", "", 0, 1, len(replicas), len(replicas), None, list(replicas)), checks)
    return checks


def test_replicas_with_other_weights_are_found() -> None:
    """Files that were replaced under a model: a replica that was restarted loads the new ones."""
    (finding,) = checked(replica("r0", "aa"), replica("r1", "bb")).findings
    assert (finding.level, finding.check) == ("error", "weights")
    assert "r0: aa, r1: bb" in finding.message and "furrow models reload m" in finding.remedy


def test_a_rollout_is_no_such_finding() -> None:
    assert not checked(replica("r0", "aa"), replica("r1", "aa"), replica("r2", "bb", revision=2)).findings
