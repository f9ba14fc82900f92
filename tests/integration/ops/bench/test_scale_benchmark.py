"""`furrow bench scale` measures every figure: at a tiny size; a limit that is missed is the exit status."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner, Result

from control.constants import HAND_OUT
from control.errors import SettingsError
from ops.bench.scale import scale as scale_module
from ops.bench.scale.scale import scale
from tests.servers import OLD

TINY = ["--entries", "3000", "--running", "4", "--waiting", "60", "--tenants", "6", "--models", "3", "--calls", "20"]
TINY += ["--agents", "3", "--apis", "2"]
ACTS = ("enqueue", "emit of 80 rows", "emit of 256", "follow", "a page", "cancel", "adoption", "claim", "a staged page")
GOINGS = ("a batch", "takeover", "retirement", "requeue", "position", "unfollow", "expiry", "repair, a page appended")
ENDS = (
    "repair, a page replaced",
    "emit of 80 rows that finish",
    rf"ends of {HAND_OUT} of 128 choices, by (?:claim|adoption|expiry|reap)",
)
ROUNDS = ("an api process's second", "an agent's tick", "a placement turn", "an unsettled turn")


def measured(monkeypatch: pytest.MonkeyPatch, script_ms: float) -> Result:
    monkeypatch.setattr(scale_module, "SCRIPT_MS", script_ms)
    monkeypatch.setattr(scale_module, "SHARE", 1e9)
    monkeypatch.setattr(scale_module, "TURNS", 3)
    monkeypatch.setattr(scale_module, "FIRST_S", 1e9)
    monkeypatch.setattr(scale_module, "ENTRY_S", 1e9)
    return CliRunner().invoke(scale, TINY, catch_exceptions=False)


def test_every_figure_has_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each script took some of the server's time, and the successor read every log under its lock."""
    result = measured(monkeypatch, 1e4)
    assert result.exit_code == 0, result.output
    for name in (*ACTS, *GOINGS, *ENDS, *ROUNDS):
        values = re.findall(rf"^(?:{name}).*, p99\.9 +(\d+\.?\d*) ms *<= .* holds$", result.output, re.MULTILINE)
        assert values, (name, result.output)
    for name in ("control: a loop without keys", *ACTS):
        matches = re.findall(rf"^{name}.*?((?: +\d+\.\d\d){{3}}) +\d+$", result.output, re.MULTILINE)
        assert matches and all(float(value) > 0 for value in matches[0].split()), (name, result.output)
    for share in re.findall(r"^thread's share of \d+ (?:agents|api processes) +(\S+) %", result.output, re.MULTILINE):
        assert 0 < float(share) <= 100
    entries, requests = re.findall(r"read ([\d,]+) entries of (\d+) requests", result.output)[0]
    assert int(entries.replace(",", "")) >= 2_900 and requests == "4"
    assert re.search(r"entries that the successor did not read +0 ", result.output)


def test_a_script_that_takes_too_long_is_repeated_and_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 1, and both times are told."""
    result = measured(monkeypatch, 1e-6)
    assert result.exit_code == 1
    assert re.search(
        r"worst \d+\.\d+ ms; repeated alone: median \d+\.\d+, worst \d+\.\d+ ms$", result.output, re.MULTILINE
    )
    assert len(re.findall("alone, p50 .*MISSED", result.output)) >= len((*ACTS, *GOINGS, *ENDS))


def test_a_server_that_does_not_count_commands_is_refused_before_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line that names what is needed."""
    monkeypatch.setenv("FURROW_REDIS_SERVER", str(OLD))
    monkeypatch.setattr(scale_module, "fill", lambda *_: pytest.fail("it was filled"))
    with pytest.raises(SettingsError, match=r"unset FURROW_REDIS_SERVER, or let it name a Valkey of 8\.1"):
        CliRunner().invoke(scale, TINY, catch_exceptions=False)
