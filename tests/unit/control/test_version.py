"""A build's version from its files' names."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from control.version import VERSION, version_of


def test_a_checkout_tells_what_it_is() -> None:
    assert f"{version('furrow').partition('+')[0]}.dev0+source" == VERSION


def test_an_installed_build_has_the_name_of_its_folder(tmp_path: Path) -> None:
    """As pip writes it; where two are left of an installation that was cut off, the library decides."""
    (tmp_path / "furrow-1.2.3+0123456789ab.dist-info").mkdir()
    assert version_of(tmp_path) == "1.2.3+0123456789ab"
    (tmp_path / "furrow-1.2.2.dist-info").mkdir()
    assert version_of(tmp_path) == version("furrow")
