"""The console's files as they are sent, and their routes.

The routes need no key: the page asks for one, and the routes that it calls check it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from litestar import Request, Response, Router, get
from litestar.exceptions import NotFoundException
from litestar.params import FromPath

FOLDER = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """A file as it is sent. `etag` is quoted, as in the header."""

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


POLICY = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        # Those that a visitor puts into a message; no answer becomes an image.
        "img-src 'self' data:",
        "frame-ancestors 'none'",
        "object-src 'none'",
        # A text can't become markup or a script, whatever a page does with it.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    # Kept by the browser and asked for again each time, with the ETag: an upgrade shows at once.
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_INDEX = "index.html"

Http = Request[Any, Any, Any]

files = cache(read_files)


@get("/", include_in_schema=False)
async def show_console(request: Http) -> Response[bytes]:
    """The page. Its references are relative, so that a proxy may serve it under a prefix."""
    if not request.scope["raw_path"].endswith(b"/"):
        return Response(b"", status_code=307, headers={**HEADERS, "location": "console/"})
    return _answer(request, files()[_INDEX])


@get("/{path:path}", include_in_schema=False)
async def show_file(request: Http, path: FromPath[str]) -> Response[bytes]:
    """One of its files. Raises NotFoundException for every other path."""
    file = files().get(path.removeprefix("/"))
    if file is None:
        raise NotFoundException(f"The console has no file {path[:255]!r}.")
    return _answer(request, file)


def _answer(request: Http, file: ConsoleFile) -> Response[bytes]:
    headers = HEADERS | {"etag": file.etag}
    tags = request.headers.get("if-none-match", "")
    if file.etag in (tag.strip().removeprefix("W/") for tag in tags.split(",")):
        return Response(b"", status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)


console_routes = Router(path="/console", route_handlers=[show_console, show_file])
