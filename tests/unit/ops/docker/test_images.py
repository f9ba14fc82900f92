"""The Dockerfiles are sound: as far as they can be judged without a Docker engine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.unit.ops.compose_file import ROOT, read

FILES = sorted((ROOT / "ops" / "docker").glob("*.Dockerfile"))


@pytest.fixture(params=FILES, ids=[path.stem for path in FILES])
def lines(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    return instructions(request.param)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instruction and its words, comments left out."""
    text = re.sub(r"\\\n", "", path.read_text())
    found = [line.partition(" ") for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in found]


def test_compose_builds_exactly_these() -> None:
    """No image without a file, no file without an image."""
    services = read(REDIS_PASSWORD="secret")["services"].values()
    named = {ROOT / service["build"]["dockerfile"] for service in services if "build" in service}
    assert named == set(FILES)
    assert len(FILES) == 2


def test_what_is_copied_exists_and_reaches_the_build(lines: list[tuple[str, str]]) -> None:
    """Every COPY source is in the folder, and .dockerignore lets it through."""
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    here = [rest for name, rest in lines if name == "COPY" and not rest.startswith("--from=wheel ")]
    sources = [source for rest in here for source in rest.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    assert set(sources) == let_through


def test_every_package_is_copied(lines: list[tuple[str, str]]) -> None:
    """The image has every package that pyproject installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = {rest.split()[0] for name, rest in lines if name == "COPY"}
    assert packages <= copied


def test_everything_is_constrained_and_torch_comes_first(lines: list[tuple[str, str]]) -> None:
    """The exact torch before anything that depends on it, where there is one."""
    compiler, *before, install = [rest for name, rest in lines if name == "RUN" and "pip install" in rest]
    assert compiler == "pip install --constraint constraints.txt click ziglang"
    assert install.startswith("pip install --constraint constraints.txt ") and "/wheels/*.whl" in install
    assert len(before) == ("[torch]" in install)
    for first in before:
        torch_pin = re.search(r"grep '(\^torch==)' constraints\.txt", first)
        assert torch_pin is not None
        assert re.search(torch_pin[1], (ROOT / "constraints.txt").read_text(), flags=re.M)


def test_it_runs_as_nobody_special(lines: list[tuple[str, str]]) -> None:
    """The last USER is not root and was made."""
    users = [rest for name, rest in lines if name == "USER"]
    assert users == ["furrow"]
    assert any(
        name == "RUN" and "useradd" in rest and rest.split("&&")[0].split()[-1] == "furrow" for name, rest in lines
    )


def test_the_base_is_a_plain_image_whose_python_is_new_enough(lines: list[tuple[str, str]]) -> None:
    """Python:3.x-slim, no registry's name, for the stage that makes the wheel and for the image."""
    builder, base = [rest for name, rest in lines if name == "FROM"]
    assert builder == f"{base} AS wheel"
    match = re.fullmatch(r"python:3\.(\d+)-slim", base)
    assert match is not None
    assert int(match[1]) >= 11


def test_an_image_is_made_from_a_wheel_with_compiled_kernels(lines: list[tuple[str, str]]) -> None:
    """So a CPU's image has no compiler, and no source is copied into the last stage."""
    last = max(at for at, (name, _) in enumerate(lines) if name == "FROM")
    made = [rest for name, rest in lines[:last] if name == "RUN" and "ops.wheels" in rest]
    assert made == ['python -m ops.wheels "$(uname -m)-linux" --out /wheels']
    copied = [rest for name, rest in lines[last:] if name == "COPY"]
    assert copied == ["constraints.txt ./", "--from=wheel /wheels /wheels"]
    install = " ".join(rest for name, rest in lines[last:] if name == "RUN")
    assert ("gcc" in install) == ("[torch]" in install) and "g++" not in install


def test_all_images_have_the_same_python() -> None:
    """The demonstration model's folder, which `load` resolves in one image, is at the same place in the other."""
    assert len({dict(instructions(path))["FROM"] for path in FILES}) == 1


def test_models_are_kept_where_the_volume_is() -> None:
    """The cache folder of the image is the mount of the workers."""
    services = read(REDIS_PASSWORD="secret")["services"]
    mounts = {services[name]["volumes"][0].split(":")[1] for name in ("worker", "worker-gpu")}
    for path in FILES:
        variables = " ".join(rest for name, rest in instructions(path) if name == "ENV")
        assert mounts == {re.search(r"HF_HOME=(\S+)", variables)[1]}  # type: ignore[index]
