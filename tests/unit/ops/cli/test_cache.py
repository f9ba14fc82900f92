"""`furrow cache` lists and clears files."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from control import cache as cache_files
from ops.cli.files import cache


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One file of each kind, those of weights used last, and two that are no entries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ["compiled/native-1.so", "verdicts/cpu-1.json", "weights/qwen-int8.weights", "compiled/lock"]
    for age, name in enumerate([*names, "weights/write-1"]):
        path = tmp_path / "furrow" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(2048))
        os.utime(path, (age, age))
    return tmp_path / "furrow"


def run(*words: str) -> Result:
    return CliRunner().invoke(cache, words)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_table(filled: Path) -> None:
    lines = run("list").stdout.splitlines()
    assert lines[0].split() == ["KIND", "SIZE", "LAST", "USE", "NAME"]
    assert [line.split()[0] for line in lines[1:4]] == ["weights", "verdicts", "compiled"]
    assert lines[1].split()[1:] == ["2", "KiB", "1970-01-01T00:00:02+00:00", "qwen-int8.weights"]
    assert lines[4] == f"3 files, 6 KiB, in {filled}"


def test_the_json_document(filled: Path) -> None:
    data = json.loads(run("list", "--json").stdout)
    assert [one["name"] for one in data] == ["qwen-int8.weights", "cpu-1.json", "native-1.so"]
    assert data[0] == {
        "kind": "weights",
        "name": "qwen-int8.weights",
        "path": str(filled / "weights" / "qwen-int8.weights"),
        "bytes": 2048,
        "used_at": "1970-01-01T00:00:02+00:00",
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["weights"], ["cpu-1.json", "lock", "native-1.so", "write-1"]),
        (["native-1.so", "verdicts"], ["lock", "qwen-int8.weights", "write-1"]),
        (["all"], ["lock", "write-1"]),
    ],
)
def test_a_kind_and_a_name_are_cleared(words: list[str], expected: list[str], filled: Path) -> None:
    assert run("clear", *words).exit_code == 0
    assert left(filled) == expected


def test_an_unknown_name_clears_nothing(filled: Path) -> None:
    found = run("clear", "weights", "qwen")
    assert found.exit_code == 2
    assert (
        "nothing in the cache is called 'qwen'. Give compiled, models, tokenizers, verdicts, weights, all, or a name"
        in found.stderr
    )
    assert len(left(filled)) == 5


def test_a_cache_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "absent"))
    assert run("list").stdout == f"The cache {tmp_path}/absent/furrow is empty.\n"
    assert run("list", "--json").stdout == "[]\n"
    assert run("clear", "all").stdout == "0 files deleted, 0 bytes.\n"


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under an unknown number."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache_files.entries("weights") == []
    with pytest.raises(OSError):
        cache_files.folder("weights").mkdir(parents=True)


def test_room_is_made_by_the_file_that_was_not_used_for_longest(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is removed than must be, and none for what fits no limit."""
    for age, name in enumerate(["old", "new"]):
        (filled / "weights" / name).write_bytes(bytes(1000))
        os.utime(filled / "weights" / name, (10 + age, 10 + age))
    assert cache_files.make_room("weights", 500, limit=2500, spare=0)
    assert [one.name for one in cache_files.entries("weights")] == ["new", "old"]
    assert cache_files.make_room("weights", 1000, limit=2500, spare=0)
    assert [one.name for one in cache_files.entries("weights")] == ["new"]
    assert not cache_files.make_room("weights", 2501, limit=2500, spare=0)
    assert [one.name for one in cache_files.entries("weights")] == ["new"]
    assert not cache_files.make_room("weights", 1, limit=2500, spare=2**62)
    assert [one.name for one in cache_files.entries("weights")] == ["new"]
