"""Groups of commands that are imported when they are called."""

from __future__ import annotations

import difflib
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
    and its line in the group's --help. `sections`: the verbs under the headings of --help; none: all are under one."""

    def __init__(
        self, verbs: dict[str, tuple[str, str]], sections: dict[str, tuple[str, ...]] | None = None, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._verbs = verbs
        self._sections = sections or {"Commands": tuple(verbs)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._verbs:
            return None
        module, _, attribute = self._verbs[cmd_name][0].partition(":")
        with without_collections():
            return getattr(importlib.import_module(module), attribute or cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises UsageError for an unknown verb, with the nearest ones."""
        if args and args[0] not in self._verbs and not args[0].startswith("-"):
            nearest = difflib.get_close_matches(args[0], self._verbs, n=2, cutoff=0.6)
            meant = f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
            ctx.fail(f"No such command '{args[0]}'.{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, verbs in self._sections.items():
            with formatter.section(heading):
                formatter.write_dl([(verb, self._verbs[verb][1]) for verb in verbs])
