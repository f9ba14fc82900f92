"""Warnings about one request, for its client and for the log: parts of it that were accepted without an effect."""

from __future__ import annotations

import re

from control.errors import RequestError

_MOST, _LONGEST_NAME, _LONGEST_TEXT = 8, 64, 200
"""Names and texts of one header, and the characters of each: names are as many and as long as the client made them."""
_UNSAFE = re.compile(r"[^ !#-\[\]-~]")
"""Characters that a quoted text in a header can't have: control characters, quotes, backslashes, all beyond ASCII."""


class Warnings:
    """Collects the warnings about one request. With `strict` the first one is a RequestError instead."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._names: list[str] = []
        self._texts: list[str] = []
        self._more = 0

    def ignore(self, field: str) -> None:
        """An unknown field was ignored."""
        if self.strict:
            raise RequestError(
                f"Unrecognized request argument supplied: {field}. Remove it, or see the API reference for what is "
                "served.",
                param=field,
                code="unknown_parameter",
            )
        if len(self._names) < _MOST:
            self._names.append(_safe(field, _LONGEST_NAME))
        else:
            self._more += 1

    def add(self, text: str, param: str | None = None) -> None:
        """A part of the request has no effect; `text` says which and why, `param` names it where it is refused."""
        if self.strict:
            raise RequestError(text, param=param, code="unsupported_parameter")
        if len(self._texts) < _MOST and (safe := _safe(text, _LONGEST_TEXT)) not in self._texts:
            self._texts.append(safe)

    @property
    def texts(self) -> list[str]:
        """All warnings, safe for a header and bounded in number and length."""
        if not self._names:
            return self._texts
        more = f" and {self._more} more" if self._more else ""
        return [f"Unknown fields were ignored: {', '.join(self._names)}{more}.", *self._texts]

    @property
    def headers(self) -> dict[str, str]:
        """The `Warning` header of the response; empty without warnings."""
        texts = self.texts
        return {"warning": ", ".join(f'299 furrow "{text}"' for text in texts)} if texts else {}


def _safe(text: str, longest: int) -> str:
    cut = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return _UNSAFE.sub("?", cut)
