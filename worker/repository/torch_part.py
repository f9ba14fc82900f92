"""The parts of a model that torch computes, and the check that torch and transformers are installed where it does."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from control.errors import SettingsError
from worker.native.host import unavailable
from worker.repository.multimodal import part_of
from worker.repository.pooling import pooling_of
from worker.repository.validation import family_of

EXTRA = "torch"
"""Of the package furrow: the packages that only some models need."""


def reason_for(config: dict[str, Any], dtype: str, devices: Sequence[str]) -> str | None:
    """The reason why torch computes a model with this configuration, or a part of it; None if C++ computes all."""
    if any(device != "cpu" for device in devices):
        return "GPUs are driven by torch"
    if (lacking := unavailable()) is not None:
        return f"torch computes models here, as {lacking}"
    if dtype == "float64":
        return "torch computes in float64"
    if pooling_of(config) is not None:
        return "torch computes vectors and scores"
    if part_of(config) is not None:
        return "torch computes the image part of this model (without it: --no-images)"
    if not family_of(config).is_native:
        return f"torch computes models of the type {config['model_type']}"
    return None


def check(reason: str | None) -> None:
    """Raise SettingsError with `reason` and the command that installs what is missing, where torch or transformers is
    not installed. Imports neither."""
    if reason is None:
        return
    missing_packages = [package for package in ("torch", "transformers") if importlib.util.find_spec(package) is None]
    if missing_packages:
        packages = " ".join(map(shlex.quote, _requirements() or missing_packages))
        verb = "is" if len(missing_packages) == 1 else "are"
        raise SettingsError(
            f"{reason}, and {' and '.join(missing_packages)} {verb} not installed on this host. "
            f"Run `{sys.executable} -m pip install {packages}`, then `furrow models reload`."
        )


def _requirements() -> list[str]:
    """The packages of the extra, with their versions; empty where Furrow was not installed as a package."""
    of_the_extra = re.compile(rf"""([^;]+?)\s*;\s*extra == ['"]{EXTRA}['"]""")
    try:
        lines = importlib.metadata.requires("furrow") or ()
    except importlib.metadata.PackageNotFoundError:
        lines = ()
    return [match[1] for match in map(of_the_extra.fullmatch, lines) if match]
