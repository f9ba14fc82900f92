"""Groups of commands that are imported when they are called."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import click


class LazyGroup(click.Group):
    """`verbs`: name → the module that has the command as an attribute, and its line in the group's --help."""

    def __init__(self, verbs: dict[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(**settings)
        self._verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._verbs:
            return None
        gc.disable()  # imports leave no garbage, and collections visit all that they make
        try:
            return getattr(importlib.import_module(self._verbs[cmd_name][0]), cmd_name)
        finally:
            gc.enable()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, line) for verb, (_, line) in self._verbs.items()])
