"""Verdicts on kernels are cached; and the switches that follow from them."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from worker.selftest import records, switches
from worker.selftest.records import Circumstances, Record, TrialResult

SUBJECT = Circumstances("NVIDIA H100 80GB", {"torch": "2.13"}, {"hidden": "64"})
WRONG = TrialResult("triton.norm", "1 x 64", "float16", "differs", "by 2")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(switches, "_off", {})
    return tmp_path / "furrow" / "verdicts"


def test_a_record_is_read_again_for_the_same_circumstances_only() -> None:
    """Another version, device or shape has its own."""
    record = Record(SUBJECT, [WRONG])
    assert records.read(SUBJECT) is None
    records.write(record)
    assert records.read(SUBJECT) == record
    for other in ({"device": "H200"}, {"versions": {"torch": "2.14"}}, {"shapes": {"hidden": "65"}}):
        assert records.read(msgspec.structs.replace(SUBJECT, **other)) is None


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe", b'{"subject": 3}'])
def test_a_damaged_record_is_none(damage: bytes, cache: Path) -> None:
    records.write(Record(SUBJECT, [WRONG]))
    [file] = cache.iterdir()
    file.write_bytes(damage)
    assert records.read(SUBJECT) is None


def test_records_are_bounded(cache: Path) -> None:
    """The oldest go first, and nothing but records lies in the folder."""
    for number in range(records.MOST_FILES + 3):
        subject = msgspec.structs.replace(SUBJECT, shapes={"hidden": str(number)})
        records.write(Record(subject, []))
        os.utime(cache / f"{subject.key}.json", (number, number))
    assert len(list(cache.iterdir())) == records.MOST_FILES
    assert records.read(msgspec.structs.replace(SUBJECT, shapes={"hidden": "2"})) is None
    assert records.read(msgspec.structs.replace(SUBJECT, shapes={"hidden": "3"})) is not None


def test_a_home_that_can_t_be_written_to_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    records.write(Record(SUBJECT, []))
    assert records.read(SUBJECT) is None


def test_what_failed_is_off_with_its_first_reason() -> None:
    """A kernel that is not available is no failure."""
    fine = TrialResult("graphs", "", "float16", "ok")
    absent = TrialResult("collective.nccl", "", "float16", "not available", "(one GPU)")
    later = msgspec.structs.replace(WRONG, verdict="raised")
    assert Record(SUBJECT, [fine, WRONG, later, absent]).off() == {"triton.norm": "differs by 2"}


def test_switches_by_record_and_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later choice switches on again what it has tried; FURROW_DISABLE outranks both."""
    switches.switch_off({"triton.norm": "differs by 2", "graphs": "raised"})
    assert switches.reason_off("cpp", "graphs") == "graphs: raised"
    switches.switch_off({}, ("graphs",))
    assert switches.reason_off("graphs") is None and switches.reason_off("triton.norm") is not None
    monkeypatch.setenv(switches.VARIABLE, "graphs, warp drive")
    assert switches.reason_off("graphs") == "graphs is in FURROW_DISABLE"
    assert switches.unknown_names() == ["warp drive"]
