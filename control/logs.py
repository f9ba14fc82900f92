"""Logs as structured lines: for eyes on a terminal, as JSON elsewhere; every library's logging goes the same way.

Context is bound with structlog.contextvars (model, replica, rank, epoch, rid) and is then on every line.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

# structlog imports rich for tracebacks in colours, which `configure` does not use: that takes each process as long as
# all of structlog. So an entry point imports this module before any other that imports structlog.
_without_rich = "rich" not in sys.modules
if _without_rich:
    sys.modules["rich"] = None  # type: ignore[assignment]
import structlog  # noqa: E402

if _without_rich:
    del sys.modules["rich"]

_CREDENTIALS = re.compile(r"(\w+://[^\s:/@]*):[^\s/@]+@")


def redact(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Hide the password of any URL in any value: a processor of structlog."""
    for name, value in event.items():
        if isinstance(value, str) and "://" in value:
            event[name] = _CREDENTIALS.sub(r"\1:***@", value)
    return event


def drop_colours(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Drop uvicorn's second copy of each message, which is for terminals: a processor of structlog."""
    event.pop("color_message", None)
    return event


def configure(style: str = "auto", level: str = "info") -> None:
    """Send structlog and the standard library's logging to standard error. `style`: json, console, or auto by tty."""
    as_json = style == "json" or (style == "auto" and not sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        drop_colours,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    # Exceptions become text before anything is hidden, and without local variables: those hold prompts and tensors.
    last: list[structlog.typing.Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        redact,
    ]
    if as_json:
        last.append(structlog.processors.JSONRenderer(default=str))
    else:
        plain = structlog.dev.plain_traceback
        last.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=last))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
