"""Phases of a start are read from the output; and none is made up."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from control.errors import ModelUnavailable
from ops.bench.load.startup import PHASES, end, read_phases

EVENTS = [json.dumps({"event": event}) for event in ("agent ready", "spawned", "leads")]
SERVED = "bench is served at http://127.0.0.1:8123/v1 (Ctrl-C stops)"


def printing(*lines: str) -> subprocess.Popen[str]:
    program = f"for line in {list(lines)!r}: print(line, flush=True)"
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def test_each_phase_ends_with_a_sign() -> None:
    """In their order, and the URL comes with the last one."""
    began = time.monotonic()
    process = printing(*EVENTS, "furrow: something else", SERVED)
    moments, url = read_phases(process, began)
    end(process)
    assert url == "http://127.0.0.1:8123"
    assert list(moments) == list(PHASES)
    assert 0 < moments["Redis and agent"] <= moments["load"]


@pytest.mark.parametrize(
    ("lines", "words"), [([*EVENTS[:2], SERVED], "imports"), ([*EVENTS, "no room"], "no room")], ids=["silent", "ended"]
)
def test_a_phase_without_a_sign_is_a_fault(lines: list[str], words: str) -> None:
    """It is named; a farm that ends is told with its last words."""
    process = printing(*lines)
    with pytest.raises(ModelUnavailable, match=words):
        read_phases(process, time.monotonic())
    end(process)
