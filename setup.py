"""Builds are told apart by their version: it ends with a hash of all that is installed.

A wheel with compiled libraries (`python -m ops.wheels`) is for one platform and any Python 3.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

VERSION = "0.1.0"
PACKAGES = ("api", "control", "ops", "worker")
LEFT_OUT = ("ops/compat/", "ops/wheels/", "worker/native/built/")
"""The first two as in pyproject.toml. Libraries are compiled from files that are counted: the wheels of
all platforms have one version."""


def build_hash(root: Path) -> str:
    """Twelve hexadecimal digits of the files of the packages and of pyproject.toml."""
    files = [path for name in PACKAGES for path in (root / name).rglob("*") if path.is_file()]
    names = sorted(path.relative_to(root).as_posix() for path in [root / "pyproject.toml", *files])
    digest = hashlib.sha256()
    for name in names:
        if "__pycache__" not in name and not name.startswith(LEFT_OUT):
            content = (root / name).read_bytes()
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()[:12]


ROOT = Path(__file__).parent


class Built(Distribution):
    """With compiled libraries it is installed where those of a platform lie."""

    def has_ext_modules(self) -> bool:
        return any((ROOT / "worker/native/built").glob("*.so"))


class Wheel(bdist_wheel):
    """ctypes loads the libraries into every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(version=f"{VERSION}+{build_hash(ROOT)}", distclass=Built, cmdclass={"bdist_wheel": Wheel})
