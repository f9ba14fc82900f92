"""A host's memory under control groups: as the files of both versions limit it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from control.control_group import memory_limit
from control.host_memory import RESERVED_BYTES, available, capacity

GIB = 2**30


def test_the_limit_is_the_least_on_the_way_up(tmp_path: Path) -> None:
    """`max` is none; version 1 has another file."""
    (tmp_path / "own").write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert memory_limit(tmp_path, tmp_path / "own") == 0
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    (tmp_path / "a" / "memory.max").write_text("4294967296\n")
    assert memory_limit(tmp_path, tmp_path / "own") == 2**32
    (tmp_path / "own").write_text("4:memory:/y\n")
    (tmp_path / "memory" / "y").mkdir(parents=True)
    (tmp_path / "memory" / "y" / "memory.limit_in_bytes").write_text("1073741824\n")
    assert memory_limit(tmp_path, tmp_path / "own") == 2**30


@pytest.mark.parametrize(
    ("own", "folder", "limit", "used", "stat"),
    [
        ("0::/a", "a", "memory.max", "memory.current", "anon 5\ninactive_file 1048576\n"),
        ("4:memory:/a", "memory/a", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file 1048576\n"),
    ],
)
def test_what_is_free_is_the_least_of_machine_and_group(
    own: str, folder: str, limit: str, used: str, stat: str, tmp_path: Path
) -> None:
    """Pages of files that the kernel drops first are free."""
    (tmp_path / "own").write_text(f"{own}\n")
    machine = psutil.virtual_memory().available
    assert available(tmp_path, tmp_path / "own") == pytest.approx(machine, rel=0.1)
    group = tmp_path / folder
    group.mkdir(parents=True)
    (group / limit).write_text("4194304\n")
    (group / used).write_text("3145728\n")
    assert available(tmp_path, tmp_path / "own") == 1048576
    (group / "memory.stat").write_text(stat)
    assert available(tmp_path, tmp_path / "own") == 2 * 1048576
    (group / used).write_text("9145728\n")
    assert available(tmp_path, tmp_path / "own") == 0


def test_the_capacity_is_that_of_the_group_or_what_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/a\n")
    total = psutil.virtual_memory().total
    assert capacity(None, tmp_path, tmp_path / "own") == total - RESERVED_BYTES
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "memory.max").write_text(f"{GIB}\n")
    assert capacity(None, tmp_path, tmp_path / "own") == GIB - RESERVED_BYTES
    assert capacity(GIB // 2, tmp_path, tmp_path / "own") == GIB // 2
    assert capacity(2 * GIB, tmp_path, tmp_path / "own") == GIB
