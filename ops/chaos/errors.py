"""Errors of a chaos run."""

from __future__ import annotations

from control.errors import FurrowError


class ChaosError(FurrowError):
    """The run can't continue; the message names the awaited condition and the time."""


class Harm(ChaosError):
    """A fault took effect and harmed the farm more than it may."""


class NoEffect(ChaosError):
    """A fault without a proof of its effect: such a strike proves nothing."""
