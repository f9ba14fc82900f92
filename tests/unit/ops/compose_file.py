"""Reads compose.yaml as `docker compose config` would: merged, and with its variables filled in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
COMPOSE = ROOT / "compose.yaml"

_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


class MissingVariable(Exception):
    """A variable that must be set is not; its message is the file's."""


def read(**variables: str) -> dict[str, Any]:
    """The file with `variables` in the environment. Raises MissingVariable."""
    return _filled(yaml.safe_load(COMPOSE.read_text()), variables)


def _filled(node: Any, variables: dict[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _filled(value, variables) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(value, variables) for value in node]
    if not isinstance(node, str):
        return node

    def value(match: re.Match[str]) -> str:
        name, kind, text = match.groups()
        if variables.get(name):
            return variables[name]
        if kind == "?":
            raise MissingVariable(text)
        return text or ""

    return _VARIABLE.sub(value, node).replace("$$", "$")
