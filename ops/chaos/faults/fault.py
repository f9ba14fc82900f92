"""What a fault is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

from ops.chaos.system.target import Target

Fault: TypeAlias = Callable[[Target, random.Random], str]
"""Strikes, waits for the proof that it took effect, undoes what must be undone, and returns the proof as a short
sentence. Raises NoEffect where it can't be proved. It does not wait until the farm is whole: the run does, or not."""
