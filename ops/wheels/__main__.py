"""Compiles the C++ sources for a platform's processors with the compiler of the package `ziglang`; builds the wheel.

`python -m ops.wheels x86_64-linux aarch64-linux --out dist`. It needs `pip install ziglang`, and no other compiler.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click

from worker.native import compiled

ROOT = Path(__file__).parents[2]
TOPS = ("api", "control", "ops", "worker")
FILES = ("pyproject.toml", "setup.py", "README.md")
COMPILE = ("-std=c++17", "-O2", "-g0", "-fPIC", "-c")
LINK = ("-g0", "-s", "-shared")


@dataclass(frozen=True)
class Platform:
    """The machine by its name in builds.VARIANTS, the compiler's target, and the platform's tag in a wheel's name."""

    machine: str
    target: str
    tag: str


PLATFORMS = {
    "x86_64-linux": Platform("x86_64", "x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64"),
    "aarch64-linux": Platform("aarch64", "aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64"),
    "arm64-macos": Platform("arm64", "aarch64-macos.11.0", "macosx_11_0_arm64"),
}
"""glibc 2.17 is of 2012: other packages that Furrow needs ask for newer ones. Nobody has tried the wheel for macOS: its
kernels compile, and the exchanges between ranks, which use Linux's pidfd, are left out."""


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.argument("names", nargs=-1, required=True, type=click.Choice(list(PLATFORMS)))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("dist"), show_default=True)
@click.option("--libraries-only", is_flag=True, help="Write the libraries to --out, and build no wheel.")
def main(names: tuple[str, ...], out: Path, libraries_only: bool) -> None:
    """A wheel for each platform."""
    if importlib.util.find_spec("ziglang") is None:
        raise click.ClickException(
            f"the package ziglang is not installed; run `{sys.executable} -m pip install ziglang`."
        )
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        platform = PLATFORMS[name]
        if libraries_only:
            compile_all(ROOT, platform, out)
            continue
        with tempfile.TemporaryDirectory(prefix="furrow-wheel-") as scratch:
            tree = Path(scratch)
            copy_sources(tree)
            compile_all(tree, platform, tree / compiled.FOLDER.relative_to(ROOT))
            build_wheel(tree, platform, out)


def copy_sources(tree: Path) -> None:
    """Copy the files of a wheel to `tree`, so that the checkout stays as it is."""
    for name in TOPS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", compiled.FOLDER.name))
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)


def compile_all(tree: Path, platform: Platform, folder: Path) -> None:
    """The libraries of all sources and kinds of processors."""
    folder.mkdir(parents=True, exist_ok=True)
    for variant in compiled.VARIANTS[platform.machine]:
        compile_one(platform, tree / compiled.KERNELS.relative_to(ROOT), variant, folder, ("-fvisibility=hidden",))
    if "linux" in platform.target:
        compile_one(platform, tree / compiled.EXCHANGE.relative_to(ROOT), compiled.ANY, folder, ())


def compile_one(
    platform: Platform, source: Path, variant: compiled.Variant, folder: Path, arguments: tuple[str, ...]
) -> None:
    """One library. Raises CalledProcessError; the compiler says why."""
    path = folder / compiled.file_name(source, variant)
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", platform.target]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="furrow-object-") as scratch:
        object_file = Path(scratch) / "object.o"
        subprocess.run([*compiler, *COMPILE, *variant.arguments, *arguments, "-o", object_file, source], check=True)
        # Linked apart: the compiler's C++ library, which goes in, is then made once, for all processors.
        subprocess.run([*compiler, *LINK, "-o", path, object_file], check=True)
    click.echo(f"{path.name}: {path.stat().st_size:,} bytes, {time.monotonic() - begun:.0f} s")


def build_wheel(tree: Path, platform: Platform, out: Path) -> None:
    """Raises CalledProcessError; pip says why."""
    tagged = f"--config-settings=--build-option=--plat-name={platform.tag}"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", tagged, "--wheel-dir", out, tree]
    subprocess.run(command, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})


if __name__ == "__main__":
    main()
