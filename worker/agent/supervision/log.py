"""Log lines of the supervisor, in the format of the other processes, without their libraries."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from datetime import datetime, timezone

_LEVELS = ("debug", "info", "warning", "error", "critical")


def log(level: str, event: str, **fields: object) -> None:
    """Write one line to standard error, as FURROW_LOG_FORMAT and FURROW_LOG_LEVEL ask."""
    lowest = (os.environ.get("FURROW_LOG_LEVEL") or "info").lower()
    if lowest in _LEVELS and _LEVELS.index(level) < _LEVELS.index(lowest):
        return
    style = os.environ.get("FURROW_LOG_FORMAT") or "auto"
    at = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")  # noqa: UP017
    if style == "json" or (style == "auto" and not sys.stderr.isatty()):
        line = json.dumps({**fields, "event": event, "level": level, "timestamp": at}, default=str)
    else:
        line = f"{at} [{level:<8}] {event:<30} " + " ".join(f"{name}={value}" for name, value in fields.items())
    with suppress(OSError):  # a reader of the logs that has gone must not end the host's processes
        os.write(2, line.encode() + b"\n")
