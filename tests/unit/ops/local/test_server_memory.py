"""The private server's memory limit: a part of the machine's, and of what a control group leaves of it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from control.errors import SettingsError
from control.sizes import parse_size
from ops.local import server_binary as memory
from ops.local.server_binary import MIB, default_memory, machine_memory, server_bytes

MACHINE = psutil.virtual_memory().total


def limited(tmp_path: Path, own: str, **limits: str) -> int:
    """`limits`: file below the control groups' root, with `__` for a slash, and its text."""
    for name, text in limits.items():
        file = tmp_path / "groups" / name.replace("__", "/").replace("memory_max", "memory.max")
        file = file.with_name(file.name.replace("limit_in_bytes", "memory.limit_in_bytes"))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "own").write_text(own)
    return machine_memory(tmp_path / "groups", tmp_path / "own")


def test_without_a_limit_it_is_the_machine_s(tmp_path: Path) -> None:
    """No control groups, or groups that say max."""
    assert machine_memory(tmp_path, tmp_path / "none") == MACHINE
    assert limited(tmp_path, "0::/a\n", a__memory_max="max\n", memory_max="max\n") == MACHINE


def test_the_smallest_limit_of_the_group_and_those_above_counts(tmp_path: Path) -> None:
    """Version 2: each group's limit bounds what is below."""
    own = "0::/a/b\n"
    assert limited(tmp_path, own, a__b__memory_max=f"{64 * MIB}\n", a__memory_max=f"{32 * MIB}\n") == 32 * MIB
    assert limited(tmp_path, own, a__b__memory_max=f"{8 * MIB}\n") == 8 * MIB


def test_a_container_sees_its_limit_at_the_root(tmp_path: Path) -> None:
    """Where the path in /proc/self/cgroup is the host's and not visible."""
    assert limited(tmp_path, "0::/docker/123\n", memory_max=f"{64 * MIB}") == 64 * MIB


def test_the_memory_limit_of_cgroups_version_1_is_read(tmp_path: Path) -> None:
    """The memory controller has a hierarchy of its own; no limit is a huge number there."""
    own = "5:cpu:/x\n4:memory:/y\n"
    assert limited(tmp_path, own, memory__y__limit_in_bytes=f"{16 * MIB}\n") == 16 * MIB
    assert limited(tmp_path, own, memory__y__limit_in_bytes="9223372036854771712\n") == MACHINE


def test_the_default_is_a_quarter_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least what the server needs, at most 16 GiB."""
    for has, gets in ((1 * MIB, 16 * MIB), (4096 * MIB, 1024 * MIB), (2**50, 16 * 1024 * MIB)):
        monkeypatch.setattr(memory, "machine_memory", lambda has=has: has)
        assert default_memory() == gets


def test_sizes_that_are_asked_for() -> None:
    """Bytes, or units of 1024; what is no size, or too little, is refused by name."""
    assert [parse_size(text) for text in ("1024", "512MiB", "1.5g", "2 GB", "3k", "7B")] == [
        1024,
        512 * MIB,
        1536 * MIB,
        2048 * MIB,
        3072,
        7,
    ]
    assert server_bytes("20MiB") == 20 * MIB and server_bytes(None) == default_memory()
    for text in ("", "much", "-1", "1XiB", "1e9"):
        with pytest.raises(SettingsError, match="is not a size"):
            parse_size(text)
    with pytest.raises(SettingsError, match="16 MiB"):
        server_bytes("1MiB")
