"""Exit statuses say whether another start may help."""

from __future__ import annotations

import fakeredis
import pytest

from control.errors import (
    CompilerMissing,
    FurrowError,
    GroupError,
    ModelFilesAway,
    NotMappable,
    RankError,
    SettingsError,
)
from control.messages import Assignment, ModelSpec
from worker.models.torch import layers
from worker.native import compiled
from worker.rank.exit_codes import LOAD_FAILED, REFUSED
from worker.rank_process import exit_status


def failed_load(cause: FurrowError) -> GroupError:
    """As a leader meets it: its own answer to the load, in the form in which other ranks answer."""
    return GroupError("load", RankError(0, "load_failed", f"{type(cause).__name__}: {cause}"), [])


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (failed_load(CompilerMissing("no compiler")), REFUSED),
        (failed_load(NotMappable("--kv-tokens 16384: no")), REFUSED),
        (GroupError("load", None, [RankError(1, "load_failed", "NotMappable: --kv-tokens 16384: no")]), REFUSED),
        (failed_load(SettingsError("the compiler did not end within 300 s")), LOAD_FAILED),
        (failed_load(ModelFilesAway("a shard is gone")), LOAD_FAILED),
        (GroupError("load", None, [RankError(1, "load_failed", "its disk is full")]), LOAD_FAILED),
        (SettingsError("no such device"), REFUSED),
    ],
)
def test_a_load_that_would_fail_again_is_not_tried_again(error: FurrowError, status: int) -> None:
    """Every start would fail so; other failed loads may pass."""
    assignment = Assignment(spec=ModelSpec(name="m", source="/m"), replica="r0", ranks=[0], devices=["cpu"])
    assert exit_status(error, fakeredis.FakeRedis(decode_responses=True), assignment, 0) == status


def test_the_error_of_weights_in_blocks_names_cause_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a compiler is there and did not end in time, it is another error."""
    monkeypatch.setattr(layers, "reason_missing", lambda: compiled.NO_COMPILER)
    monkeypatch.setenv("CXX", "/nowhere/g++")
    error = layers._not_in_cpp("weights in q4_0 are", "Serve them with --dequantize on this host.")
    assert isinstance(error, CompilerMissing)
    for part in ("weights in q4_0", "there is no C++ compiler", "apt-get install g++", "--dequantize"):
        assert part in str(error)
    monkeypatch.setenv("CXX", "/bin/sh")
    monkeypatch.setattr(layers, "reason_missing", lambda: "the C++ compiler did not end within 300 s")
    assert type(layers._not_in_cpp("weights in q4_0 are", "…")) is SettingsError
