"""`furrow pull`, `list` and `rm`: the models that this user has downloaded to this host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime

import click

from control.errors import ModelFilesError
from control.sizes import in_words
from ops.cli.progress import Stage, Waiting
from ops.cli.tables import echo_json, echo_line, echo_table, json_option
from worker.repository.cached import CachedModel, cached_models, remove
from worker.repository.download import Download
from worker.repository.downloaded import Downloaded
from worker.repository.source import cache_folder, on_this_host


@click.command(short_help="Download a model.")
@click.argument("model")
@click.option(
    "--gguf", metavar="FILE", help="The GGUF file, where a repository has several; a part of its name will do."
)
def pull(model: str, gguf: str | None) -> None:
    """Download MODEL, a repository of Hugging Face or `smollm2`, so that the first start does not wait for it."""
    place = on_this_host(model, gguf)
    if place is None:
        with Waiting() as waiting:

            def show(progress: Downloaded) -> None:
                waiting.show(Stage(f"downloading {progress.file}", progress.done, progress.total))

            place = Download(model, "main", cache_folder(None, os.environ)[0], gguf).run(show)
    echo_line(str(place))


@click.command(name="list", short_help="List the downloaded models.")
@json_option
def list_models(as_json: bool) -> None:
    """List the downloaded models of this user with size and last use, the newest first.

    They are in the cache of Hugging Face files (HF_HOME), which other programs use too, and in Furrow's own.
    """
    models = cached_models()
    if as_json:
        echo_json([
            {
                "name": one.name,
                "path": str(one.path),
                "bytes": one.bytes,
                "used_at": _when(one),
                "complete": one.complete,
            }
            for one in models
        ])  # fmt: skip
        return
    if not models:
        click.echo(f"No model is downloaded; {cache_folder(None, os.environ)[0]} has none.")
        return
    rows = [("NAME", "SIZE", "LAST USE", "FILES")]
    rows += [(one.name, in_words(one.bytes), _when(one), "all" if one.complete else "incomplete") for one in models]
    echo_table(rows)
    click.echo(f"{len(models)} models, {in_words(sum(one.bytes for one in models))}")


@click.command(short_help="Delete downloaded models.")
@click.argument("names", metavar="MODEL...", nargs=-1, required=True)
def rm(names: Sequence[str]) -> None:
    """Delete downloaded models by the names that `furrow list` shows.

    A process that runs one keeps it until it ends; it is downloaded again by its next start.
    """
    models = {one.name: one for one in cached_models()}
    if unknown := [name for name in names if name not in models]:
        raise ModelFilesError(f"No downloaded model is called {unknown[0]!r}; `furrow list` shows their names.")
    for name in names:
        try:
            remove(models[name])
        except OSError as error:
            raise ModelFilesError(f"{models[name].path} can't be deleted: {error}") from error
        echo_line(f"{name} deleted, {in_words(models[name].bytes)} freed")


def _when(model: CachedModel) -> str:
    return datetime.fromtimestamp(model.used_at, UTC).isoformat(timespec="seconds")
