"""The table of failure detectors in docs/reliability.md."""

from __future__ import annotations

from worker.detectors import DETECTORS


def table() -> str:
    rows = [f"| {one.fault} | {one.found_by} | {one.action} | {one.after} |\n" for one in DETECTORS]
    return "".join(["| fault | detector | action | after |\n", "|---|---|---|---|\n", *rows])
