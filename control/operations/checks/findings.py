"""The findings of a check, and the exit status that follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

Level = Literal["ok", "warning", "error"]
Subject = Literal["redis", "hosts", "models", "api"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")
"""The exit status of the doctor is the place of the worst level."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check. `where` names a host, a model or a server; `remedy` is empty where nothing is wrong."""

    subject: Subject
    check: str
    level: Level
    where: str
    message: str
    remedy: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, in the order of the checks, and the worst level."""

    level: Level
    findings: list[Finding]


class Checks:
    """Findings about one subject and place."""

    def __init__(self, subject: Subject, where: str = "") -> None:
        self._subject: Subject = subject
        self._where = where
        self.findings: list[Finding] = []

    def ok(self, check: str, message: str) -> None:
        self._add(check, "ok", message, "")

    def warning(self, check: str, message: str, remedy: str) -> None:
        self._add(check, "warning", message, remedy)

    def error(self, check: str, message: str, remedy: str) -> None:
        self._add(check, "error", message, remedy)

    def judge(self, level: Level, check: str, message: str, remedy: str) -> None:
        """A finding of this level; without a remedy where it is ok."""
        self._add(check, level, message, "" if level == "ok" else remedy)

    def _add(self, check: str, level: Level, message: str, remedy: str) -> None:
        self.findings.append(
            Finding(subject=self._subject, check=check, level=level, where=self._where, message=message, remedy=remedy)
        )


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level, ok without any finding."""
    return LEVELS[max((LEVELS.index(finding.level) for finding in findings), default=0)]


def report_of(findings: Sequence[Finding]) -> Report:
    return Report(level=worst(findings), findings=list(findings))
