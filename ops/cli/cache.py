"""`furrow cache`: files that this user of this host keeps to start faster. All of them are made again when needed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import UTC, datetime

import click

from control.cache import files
from control.cache.files import KINDS, Entry
from ops.cli.tables import echo_json, echo_line, echo_table, json_option

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


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
    found = _all()
    if as_json:
        described = [
            {"kind": one.kind, "name": one.name, "path": str(one.path), "bytes": one.bytes, "used_at": _when(one)}
            for one in found
        ]
        echo_json(described)
        return
    if not found:
        click.echo(f"The cache {files.folder('weights').parent} is empty.")
        return
    rows = [("KIND", "SIZE", "LAST USE", "NAME")]
    rows += [(one.kind, _size(one.bytes), _when(one), one.name) for one in found]
    echo_table(rows)
    click.echo(f"{len(found)} files, {_size(sum(one.bytes for one in found))}, in {files.folder('weights').parent}")


@cache.command()
@click.argument("what", nargs=-1, required=True)
def clear(what: tuple[str, ...]) -> None:
    """Delete files of the cache: all of a kind (`furrow cache list` shows them), those with a name, or `all`.

    Processes that run keep what they use.
    """
    found = _all()
    known = {*KINDS, "all", *(one.name for one in found)}
    if unknown := [word for word in what if word not in known]:
        raise click.UsageError(
            f"nothing in the cache is called {unknown[0]!r}. Give {', '.join(KINDS)}, all, or a name that "
            "`furrow cache list` shows."
        )
    chosen = [one for one in found if "all" in what or one.kind in what or one.name in what]
    kept = [one for one in chosen if not files.remove(one)]
    removed = [one for one in chosen if one not in kept]
    click.echo(f"{len(removed)} files deleted, {_size(sum(one.bytes for one in removed))}.")
    for one in kept:
        echo_line(f"furrow: {one.path} can't be deleted: no permission.", err=True)
    sys.exit(1 if kept else 0)


def _all() -> list[Entry]:
    found: Iterable[Entry] = (one for kind in KINDS for one in files.entries(kind))
    return sorted(found, key=lambda one: -one.used_at)


def _when(entry: Entry) -> str:
    return datetime.fromtimestamp(entry.used_at, UTC).isoformat(timespec="seconds")


def _size(count: int) -> str:
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"
