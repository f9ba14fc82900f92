"""A private farm's folder ends with it; or with the next one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ops.cli.run.own_farm import _private_folder


def test_folders_of_killed_commands_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in use stay, and those that may have no lock yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    left, new = (tmp_path / "furrow" / "run" / f"farm-{name}" for name in ("left", "new"))
    for folder in (left, new):
        folder.mkdir(parents=True)
        (folder / "in-use").touch()
    os.utime(left, (0, 0))
    with _private_folder() as used:
        assert used.stat().st_mode & 0o777 == 0o700
        os.utime(used, (0, 0))
        with _private_folder():
            assert used.exists() and new.exists() and not left.exists()
    assert not used.exists()
