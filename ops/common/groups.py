"""Groups of commands that are imported when they are called."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import click


@contextmanager
def without_collections() -> Generator[None]:
    """For imports, which leave no garbage: no collection visits what they make, now or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class LazyGroup(click.Group):
    """`verbs`: name → the module that has the command as an attribute, with `:attribute` where that has another name,
    and its line in the group's --help."""

    def __init__(self, verbs: dict[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(**settings)
        self._verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._verbs:
            return None
        module, _, attribute = self._verbs[cmd_name][0].partition(":")
        with without_collections():
            return getattr(importlib.import_module(module), attribute or cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, line) for verb, (_, line) in self._verbs.items()])
