"""An environment in which packages that are installed are not found."""

from __future__ import annotations

from pathlib import Path

HIDE = """import importlib.machinery
whole = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {packages!r} else whole(name, path, target)
importlib.machinery.PathFinder.find_spec = find_spec
"""


def without(folder: Path, *packages: str) -> dict[str, str]:
    """Variables for a Python process that finds none of `packages`; `folder` is empty, and this function's alone."""
    (folder / "sitecustomize.py").write_text(HIDE.format(packages=packages))
    return {"PYTHONPATH": str(folder)}
