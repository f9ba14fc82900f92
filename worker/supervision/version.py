"""The version of Furrow that this process runs."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("furrow")
