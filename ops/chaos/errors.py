"""What can go wrong in a chaos run that is not the farm's doing."""

from __future__ import annotations

from control.errors import FurrowError


class ChaosError(FurrowError):
    """The run can't go on; the message says what was waited for and how long."""


class Harm(ChaosError):
    """A fault took effect and cost what it may not cost."""


class NoEffect(ChaosError):
    """A fault was sent, but nothing shows that it took effect: such a strike proves nothing."""
