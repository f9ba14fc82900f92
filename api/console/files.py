"""The console's files as they are sent: read once, each with its type and an ETag of its content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """The bytes of a file. `etag` is quoted, as the header has it."""

    body: bytes
    media_type: str
    etag: str


def read_files(folder: Path = FOLDER) -> dict[str, ConsoleFile]:
    """Every file of the console by its path below /console, such as `lib/dom.js`."""
    paths = (path for path in folder.rglob("*") if path.suffix in TYPES and path.is_file())
    return {path.relative_to(folder).as_posix(): _read(path) for path in paths}


def _read(path: Path) -> ConsoleFile:
    body = path.read_bytes()
    return ConsoleFile(body, TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
