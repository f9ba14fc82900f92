"""The type of a fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

from ops.chaos.system.target import Target

Fault: TypeAlias = Callable[[Target, random.Random], str]
"""Strikes, waits for the proof of its effect, cleans up, and returns the proof as a short sentence. Raises NoEffect
without a proof. The run, and not the fault, waits until the farm is whole."""
