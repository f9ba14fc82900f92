"""The progress of a wait: a bar with rate and time left on a terminal, else a line every few seconds."""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from control.replicas import model_overviews
from ops.cli.tables import LONGEST_CELL, echo_line, one_line

if TYPE_CHECKING:
    from rich.progress import Progress

LINES_EVERY_S = 3.0
LONG = 100
"""Characters of whole sentences that a line does not say again."""
_NUMBERS = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Stage:
    """The stage of a wait: `done` of `total` bytes, where it has any."""

    text: str
    done: int = 0
    total: int = 0


def stage_of(overview: model_overviews.Overview) -> Stage:
    """The stage of a model that is loaded: of the replica that is nearest to its end."""
    first = overview.state in ("loading", "recovering") and overview.detail
    text = f"{overview.model}: {overview.detail if first else overview.state}"
    text += f" ({overview.detail})" if overview.detail and not first else ""
    shares = [
        (replica.done_bytes / replica.total_bytes, replica) for replica in overview.replicas if replica.total_bytes
    ]
    if not shares or overview.state not in ("loading", "recovering"):
        return Stage(text)
    _, best = max(shares, key=lambda share: share[0])
    return Stage(text, best.done_bytes, best.total_bytes)


def stage_here(overview: model_overviews.Overview) -> Stage:
    """As `stage_of`, of a model whose worker is started by this command: that it is not there yet is no news."""
    if overview.detail in (model_overviews.NO_WORKER, model_overviews.NO_LEADER):
        return Stage(f"{overview.model}: starting")
    return stage_of(overview)


class Waiting:
    """Shows the stages of a wait on standard error; use as a context manager. The bar disappears at the end."""

    def __init__(self, logs: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """`logs`: other processes write to the terminal too, so that a bar is drawn for bytes only, not for words."""
        self._logs = logs
        self._clock = clock
        self._printed: Stage | None = None
        self._printed_at = -LINES_EVERY_S
        self._bar: Progress | None = None
        self._task = None
        self._began: tuple[str, int] = ("", 0)
        if sys.stderr.isatty():
            from ops.cli.bar import make_bar  # rich, which the usual wait in a log or a pipe does without

            self._bar = make_bar()

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        self.hide()

    def show(self, stage: Stage) -> None:
        """Show the stage. Without a bar a line is printed every LINES_EVERY_S at most, where something changed; of a
        long one only the sentences that did, as the same error comes with each try."""
        stage = replace(stage, text=one_line(stage.text, LONGEST_CELL))
        if self._bar is not None and (stage.total or not self._logs):
            self._draw(self._bar, stage)
            return
        self.hide()
        if self._is_news(stage):
            text = _changed(self._printed.text if self._printed is not None else "", stage.text)
            self._printed, self._printed_at = stage, self._clock()
            click.echo(f"furrow: {text}{_of(stage)}", err=True)

    def hide(self) -> None:
        """Remove the bar until something is shown again."""
        if self._bar is not None:
            self._bar.stop()

    def print(self, line: str) -> None:
        """Print a line on standard output; where a bar is drawn on the same terminal, above it."""
        if self._bar is None or not sys.stdout.isatty():
            echo_line(line)
        else:
            self._bar.console.print(one_line(line), markup=False, highlight=False)

    def _draw(self, bar: Progress, stage: Stage) -> None:
        kind = (_NUMBERS.sub("", stage.text), stage.total)
        if self._task is None or kind != self._began:  # another file, whose rate is its own
            for task in bar.task_ids:
                bar.remove_task(task)
            self._task, self._began = bar.add_task("", total=stage.total or None), kind
        bar.update(self._task, description=stage.text, completed=stage.done)
        bar.start()

    def _is_news(self, stage: Stage) -> bool:
        return stage != self._printed and self._clock() - self._printed_at >= LINES_EVERY_S


def _changed(before: str, text: str) -> str:
    """The sentences of a text that follow those which it has in common with the one before, where these are long."""
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False))
    beginning = text.rfind(". ", 0, sum(1 for _ in equal)) + 2
    return f"… {text[beginning:]}" if LONG < beginning < len(text) else text


def _of(stage: Stage) -> str:
    return f", {stage.done / 1e6:.1f} of {stage.total / 1e6:.1f} MB" if stage.total else ""
