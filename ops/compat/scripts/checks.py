"""Checks of one client: run each, tell what came of it as a line of JSON. Knows nothing but the standard library."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

BASE_URL = os.environ["COMPAT_BASE_URL"]
MODEL = os.environ["COMPAT_MODEL"]
KEY = os.environ["COMPAT_KEY"]
SAMPLES = os.environ.get("COMPAT_SAMPLES", "")
PAUSE_URL = os.environ.get("COMPAT_PAUSE_URL", "")
"""A POST to it stops the leader for 0.6 s; empty where the run can't do that."""
SCRIPTED_URL = os.environ.get("COMPAT_SCRIPTED_URL", "")
"""The base URL of a farm whose model answers as `order` says; empty where there is none."""
SILENT = "stopped leader"
LONG = "Count from 1 to 60."
"""A question whose answer is long enough to be disturbed in its middle."""

_checks: dict[str, Callable[[], Any]] = {}


def check(title: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function, plain or async, that raises where the client or the server does not do as `title` says."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        _checks[title] = function
        return function

    return register


def pausing(title: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """As `check`, where the run can stop the leader; else the check is left out."""
    return check(title) if PAUSE_URL else lambda function: function


def pause() -> float:
    """Stop the leader, which goes on 0.6 s later; the moment."""
    with urllib.request.urlopen(urllib.request.Request(PAUSE_URL, b""), timeout=30):
        return time.monotonic()


def disturbed(texts: Iterable[str]) -> str:
    """The text of a stream in whose middle the leader is stopped. Raises where the stream had no silence."""
    said, paused_at = "", None
    for text in texts:
        said += text
        if paused_at is None and len(said) > 5:
            paused_at = pause()
    assert paused_at is not None and time.monotonic() - paused_at > 0.5, f"no silence in {said!r}"
    return said


def terse() -> dict[str, int]:
    """A `logit_bias` under which a small model that must write JSON comes to its end."""
    return {str(_token(sign)): 100 if sign == '"' else 50 for sign in '"{}[],:'}


def _token(text: str) -> int:
    body = json.dumps({"model": MODEL, "prompt": text, "add_special_tokens": False}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{BASE_URL}/tokenize", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["tokens"][0]


def order(**what: Any) -> str:
    """An order to the scripted model (`ops/compat/scripted.py`) in a user's turn: `say`, or `call` and `then`."""
    return f"[order:{base64.b64encode(json.dumps(what).encode()).decode()}]"


def tell(title: str, ok: bool, detail: str = "") -> None:
    print(json.dumps({"check": title, "ok": ok, "detail": detail}), flush=True)


def main() -> None:
    """Run all checks in their order."""
    for title, function in _checks.items():
        try:
            found = function()
            if inspect.iscoroutine(found):
                asyncio.run(found)
            tell(title, True)
        except Exception as error:
            line = next(
                (
                    frame.lineno
                    for frame in reversed(traceback.extract_tb(error.__traceback__))
                    if "scripts" in frame.filename
                ),
                0,
            )
            tell(title, False, f"{type(error).__name__}: {str(error)[:300]} (line {line})")
