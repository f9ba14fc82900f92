"""A figure names its machine."""

from __future__ import annotations

import re

from ops.harness.program import describe


def test_the_machine_is_described_in_one_line() -> None:
    """Cores, memory, load and the versions of what computes."""
    pattern = r"machine: .+, \d+ cores, \d+ GiB, load \d+\.\d; Python \d+\.\d+\.\d+, torch \S+, transformers \S+"
    assert re.fullmatch(pattern, describe())
