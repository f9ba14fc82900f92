"""The version of Furrow that this process runs, and the oldest one of Redis that it uses."""

from __future__ import annotations

import re
from pathlib import Path

_CHECKOUT = re.compile(r'^VERSION = "(.+)"$', re.MULTILINE)


def version_of(root: Path) -> str:
    """`root`: the folder that holds `control/`. The names of files tell it: `importlib.metadata` takes 30 ms to import,
    in each process of a start."""
    setup = root / "setup.py"
    if setup.exists() and (match := _CHECKOUT.search(setup.read_text(encoding="utf-8"))):
        return f"{match[1]}.dev0+source"  # a checkout, whose files change without an installation
    installed = [folder.name for folder in root.glob("furrow-*.dist-info")]
    if len(installed) == 1:
        return installed[0].removeprefix("furrow-").removesuffix(".dist-info")
    from importlib.metadata import version

    return version("furrow")


VERSION = version_of(Path(__file__).parent.parent)
"""The build of Furrow that this process runs. Two builds have different versions (setup.py); all checkouts have one."""
OLDEST_REDIS = (6, 2)
"""The oldest version of a Redis-compatible server that Furrow uses."""
