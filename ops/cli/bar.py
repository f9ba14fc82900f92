"""The bar of a wait on a terminal. Apart from `progress`, as rich takes long to import."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text


def make_bar() -> Progress:
    """A bar on standard error, without a task; it disappears at its end."""
    # On a narrow terminal the text is cut, not the numbers.
    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
    numbers = [BarColumn(16), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True)]
    columns = [SpinnerColumn(table_column=Column(width=1)), text, *map(_OfBytes, numbers)]
    return Progress(*columns, console=Console(stderr=True), transient=True, expand=True)


class _OfBytes(ProgressColumn):
    """Another column, empty while there are no bytes to count."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column
        self.max_refresh = None

    def render(self, task: Task) -> Text:
        return self._column(task) if task.total else Text("")  # type: ignore[return-value]
