"""The versions of Redis-compatible servers that Furrow uses."""

from __future__ import annotations

OLDEST_VERSION = (6, 2)
