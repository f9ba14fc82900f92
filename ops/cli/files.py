"""The files of this user: `furrow pull`, `list` and `rm` for downloaded models, `furrow cache` for what makes the next
start faster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from control import cache as cache_files
from control.cache import KINDS, Entry
from control.errors import ModelFilesError
from control.sizes import in_words
from ops.cli.progress import Stage, Waiting
from ops.cli.tables import echo_line, echo_list, json_option, utc
from worker.repository.download_progress import Downloaded
from worker.repository.local_models import CachedModel, cached_models, remove
from worker.repository.source import Download, cache_folder, on_this_host


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
    nothing = f"No model is downloaded; {cache_folder(None, os.environ)[0]} has none."
    if echo_list(models, COLUMNS, nothing, as_json, _model_described):
        click.echo(f"{len(models)} models, {in_words(sum(model.bytes for model in models))}")


COLUMNS: dict[str, Callable[[CachedModel], str]] = {
    "NAME": lambda model: model.name,
    "SIZE": lambda model: in_words(model.bytes),
    "LAST USE": lambda model: utc(model.used_at),
    "FILES": lambda model: "all" if model.complete else "incomplete",
}


def _model_described(model: CachedModel) -> dict[str, Any]:
    about = {"name": model.name, "path": str(model.path), "bytes": model.bytes}
    return about | {"used_at": utc(model.used_at), "complete": model.complete}


@click.command(short_help="Delete downloaded models.")
@click.argument("names", metavar="MODEL...", nargs=-1, required=True)
def rm(names: Sequence[str]) -> None:
    """Delete downloaded models by the names that `furrow list` shows.

    A process that runs one keeps it until it ends; it is downloaded again by its next start.
    """
    models = {model.name: model for model in cached_models()}
    if unknown := [name for name in names if name not in models]:
        raise ModelFilesError(f"No downloaded model is called {unknown[0]!r}; `furrow list` shows their names.")
    for name in names:
        try:
            remove(models[name])
        except OSError as error:
            raise ModelFilesError(f"{models[name].path} can't be deleted: {error}") from error
        echo_line(f"{name} deleted, {in_words(models[name].bytes)} freed")


# --- the cache --------------------------------------------------------------------------------------------------------


@click.group()
def cache() -> None:
    """List and clear what this host keeps to start faster: packed weights, libraries, models from packages, tokenizers.

    Every file of it is made again when it is needed, so clearing costs time only. FURROW_WEIGHT_CACHE limits the packed
    weights, in GiB.
    """


@cache.command(name="list")
@json_option
def list_entries(as_json: bool) -> None:
    """List the files of the cache with size and last use, the newest first."""
    entries = _all()
    folder = cache_files.folder("weights").parent
    if echo_list(entries, ENTRY_COLUMNS, f"The cache {folder} is empty.", as_json, _entry_described):
        click.echo(f"{len(entries)} files, {in_words(sum(entry.bytes for entry in entries))}, in {folder}")


ENTRY_COLUMNS: dict[str, Callable[[Entry], str]] = {
    "KIND": lambda entry: entry.kind,
    "SIZE": lambda entry: in_words(entry.bytes),
    "LAST USE": lambda entry: utc(entry.used_at),
    "NAME": lambda entry: entry.name,
}


def _entry_described(entry: Entry) -> dict[str, Any]:
    about = {"kind": entry.kind, "name": entry.name, "path": str(entry.path), "bytes": entry.bytes}
    return about | {"used_at": utc(entry.used_at)}


@cache.command()
@click.argument("targets", metavar="WHAT...", nargs=-1, required=True)
def clear(targets: tuple[str, ...]) -> None:
    """Delete files of the cache: all of a kind (`furrow cache list` shows them), those with a name, or `all`.

    Processes that run keep what they use.
    """
    entries = _all()
    names = {*KINDS, "all", *(entry.name for entry in entries)}
    if unknown := [word for word in targets if word not in names]:
        raise click.UsageError(
            f"nothing in the cache is called {unknown[0]!r}. Give {', '.join(KINDS)}, all, or a name that "
            "`furrow cache list` shows."
        )
    matching = [entry for entry in entries if "all" in targets or entry.kind in targets or entry.name in targets]
    undeletable = [entry for entry in matching if not cache_files.remove(entry)]
    removed = [entry for entry in matching if entry not in undeletable]
    click.echo(f"{len(removed)} files deleted, {in_words(sum(entry.bytes for entry in removed))}.")
    for entry in undeletable:
        echo_line(f"furrow: {entry.path} can't be deleted: no permission.", err=True)
    sys.exit(1 if undeletable else 0)


def _all() -> list[Entry]:
    entries: Iterable[Entry] = (entry for kind in KINDS for entry in cache_files.entries(kind))
    return sorted(entries, key=lambda entry: -entry.used_at)
