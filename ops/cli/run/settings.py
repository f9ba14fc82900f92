"""The sampling parameters that `/set` takes, and their values."""

from __future__ import annotations

import json
from typing import Any

from control.bounds import Range, refusal
from control.errors import SettingsError

FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
INTEGERS = ("top_k", "max_tokens", "min_tokens", "seed")
NAMES = (*FLOATS, *INTEGERS, "stop")
MOST_STOPS = 16
LONGEST_STOP = 1024
"""Characters."""
_MAX_TOKENS = Range(1, 2**31 - 1)


def read(name: str, text: str) -> Any:
    """The value that the user wrote. Raises SettingsError naming the parameter, the value and what is accepted."""
    if name not in NAMES:
        raise SettingsError(f"'{name}' is no parameter. Use one of: {', '.join(NAMES)}.")
    if name == "stop":
        return check(name, _stops(text))
    try:
        value = float(text) if name in FLOATS else int(text)
    except ValueError:
        kind = "a number" if name in FLOATS else "an integer"
        raise SettingsError(f"'{name}' must be {kind}, not {text!r}.") from None
    return check(name, value)


def check(name: str, value: Any) -> Any:
    """The value, if the API takes it. Raises SettingsError."""
    if name not in NAMES:
        raise SettingsError(f"'{name}' is no parameter. Use one of: {', '.join(NAMES)}.")
    if name == "stop":
        return _checked_stops(value)
    kinds = (int, float) if name in FLOATS else (int,)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise SettingsError(f"'{name}' must be {'a number' if name in FLOATS else 'an integer'}, not {value!r}.")
    if (text := refusal(name, value, _MAX_TOKENS if name == "max_tokens" else None)) is not None:
        raise SettingsError(text)
    return value


def _stops(text: str) -> Any:
    """A JSON list or string, where it is one; else the text itself."""
    if text.startswith(("[", '"')):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise SettingsError(f"'stop' {text!r} is no JSON: {error}.") from None
        return [value] if isinstance(value, str) else value
    return [text]


def _checked_stops(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else []
    if not texts or not all(isinstance(one, str) and one for one in texts):
        raise SettingsError("'stop' is a text, or a JSON list of texts such as " + r'["\n\n", "END"]' + ".")
    if len(texts) > MOST_STOPS or any(len(one) > LONGEST_STOP for one in texts):
        raise SettingsError(f"'stop' may have {MOST_STOPS} texts of {LONGEST_STOP} characters.")
    return texts
