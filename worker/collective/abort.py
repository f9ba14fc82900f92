"""Lets another thread end a rank's wait for its peers."""

from __future__ import annotations

import ctypes

from control.errors import CollectiveLeft


class Abort:
    """One epoch's word to leave. It stands once said: a new epoch has an Abort of its own."""

    def __init__(self) -> None:
        self._said = ctypes.c_int32(0)
        self.reason = ""

    def say(self, reason: str) -> None:
        """Leave, and wait for nobody again. From any thread; the first reason stands."""
        if not self._said.value:
            self.reason = reason
            self._said.value = 1

    @property
    def said(self) -> bool:
        return bool(self._said.value)

    @property
    def address(self) -> int:
        """Of an int32 that is not 0 once said, for who looks from outside the interpreter."""
        return ctypes.addressof(self._said)

    def check(self) -> None:
        """Raise CollectiveLeft once said."""
        if self.said:
            raise CollectiveLeft(self.reason)
