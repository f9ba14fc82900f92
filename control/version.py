"""The version of Furrow that this process runs."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path


def _version(root: Path) -> str:
    """`root`: the folder that holds `control/`."""
    installed = version("furrow")
    if (root / "setup.py").exists():  # a checkout, whose files change without an installation
        return f"{installed.partition('+')[0]}.dev0+source"
    return installed


VERSION = _version(Path(__file__).parent.parent)
"""The build of Furrow that this process runs. Two builds have different versions (setup.py); all checkouts have one."""
