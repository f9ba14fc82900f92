"""Checks of one client: run each, tell what came of it as a line of JSON. Knows nothing but the standard library."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any

BASE_URL = os.environ["COMPAT_BASE_URL"]
MODEL = os.environ["COMPAT_MODEL"]
KEY = os.environ["COMPAT_KEY"]
SAMPLES = os.environ.get("COMPAT_SAMPLES", "")

_checks: dict[str, Callable[[], Any]] = {}


def check(title: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function, plain or async, that raises where the client or the server does not do as `title` says."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        _checks[title] = function
        return function

    return register


def terse() -> dict[str, int]:
    """A `logit_bias` under which a small model that must write JSON comes to its end."""
    return {str(_token(sign)): 100 if sign == '"' else 50 for sign in '"{}[],:'}


def _token(text: str) -> int:
    body = json.dumps({"model": MODEL, "prompt": text, "add_special_tokens": False}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{BASE_URL}/tokenize", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["tokens"][0]


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
