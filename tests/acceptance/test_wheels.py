"""A wheel works in a bare environment: no compiler, no git, no extras.

Optional (`.ci/wheels`): it takes the package ziglang as compiler, a package index and the network.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from worker.native.compiled import VARIANTS

VERSIONS = ("3.11", "3.12", "3.13")
ANSWER_WITHIN_S = 60.0
"""From the start of pip to the end of the answer."""
QUESTION = "What is the capital of France?"
TOOLS = ("sh", "env", "uname", "cat", "ldconfig")

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed: pip install ziglang"
    ),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the wheel that is tried is that of x86-64"),
]


def interpreter(version: str) -> str | None:
    """A Python of this version that runs."""
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python3"))
    for command in [shutil.which(f"python{version}"), *map(str, pyenv)]:
        if command is not None and not subprocess.run([command, "-c", "import venv"], capture_output=True).returncode:
            return command
    return None


MACHINES = ("x86_64", "aarch64")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel for each of MACHINES, by its name."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "ops.wheels", *(f"{machine}-linux" for machine in MACHINES), "--out", folder]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=800)
    return {machine: next(folder.glob(f"*_{machine}.whl")) for machine in MACHINES}


@pytest.fixture(scope="module")
def wheel(wheels: dict[str, Path]) -> Path:
    """That of this machine."""
    return wheels["x86_64"]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_wheel_has_every_variant_and_the_sources(machine: str, wheels: dict[str, Path]) -> None:
    assert wheels[machine].name.endswith(f"-py3-none-manylinux_2_17_{machine}.whl")
    names = zipfile.ZipFile(wheels[machine]).namelist()
    built = [name for name in names if name.startswith("worker/native/built/")]
    assert len(built) == len(VARIANTS[machine]) + 1
    assert "worker/native/source/native.cpp" in names and "worker/collective/exchange.cpp" in names
    assert not any(name.startswith(("ops/wheels", "ops/compat", "tests")) for name in names)


@pytest.mark.skipif(importlib.util.find_spec("auditwheel") is None, reason="auditwheel is not installed")
@pytest.mark.parametrize("machine", MACHINES)
def test_auditwheel_accepts_it(machine: str, wheels: dict[str, Path]) -> None:
    """It finds no symbol that is newer than the tag says."""
    run = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", wheels[machine]], capture_output=True, text=True, timeout=100
    )
    assert f'platform tag: "manylinux_2_17_{machine}"' in " ".join(run.stdout.split()), run.stdout + run.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_a_model_answers_within_a_minute_of_pip(version: str, wheel: Path, tmp_path: Path) -> None:
    """The kernels of the wheel are used: nothing is compiled, so the first start is as quick as the second."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        if (path := shutil.which(name)) is not None:
            (tools / name).symlink_to(path)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FURROW_", "XDG_", "HF_", "CXX"))}
    environment = {**kept, "PATH": str(tools), "HOME": str(tmp_path)}
    subprocess.run([python, "-m", "venv", tmp_path / "env"], check=True, timeout=200)
    begun = time.monotonic()
    install = [tmp_path / "env/bin/python", "-m", "pip", "install", "--quiet", "--no-cache-dir", wheel]
    subprocess.run(install, check=True, env=environment, timeout=400)
    command = [tmp_path / "env/bin/furrow", "run", "smollm2", QUESTION]
    run = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    seconds = time.monotonic() - begun
    assert run.returncode == 0 and run.stdout.strip(), run.stderr
    print(f"Python {version}: {seconds:.0f} s from the start of pip to the answer")
    compiled = [path for path in (tmp_path / ".cache/furrow/compiled").iterdir() if path.suffix == ".so"]
    assert not compiled
    assert seconds <= ANSWER_WITHIN_S
