"""A hub on loopback for huggingface_hub: repositories from memory, of which some hang or break off."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """`files` by repository and name; requests for `hung` repositories are never answered. `cut` bytes into a file of
    this name the server stops sending, while that is set."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.hung: set[str] = set()
        self.cut: tuple[str, int] | None = None
        self.asked: list[tuple[str, str, str, str]] = []
        """Method, repository, name and range of each request."""
        self.over = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def do_GET(self) -> None:
                hub._answer(self, body=True)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        if request.path.startswith("/api/models/"):
            self._list(request)
            return
        repository, _, rest = request.path.lstrip("/").partition("/resolve/")
        file = rest.partition("/")[2]
        asked = request.headers.get("Range", "")
        self.asked.append((request.command, repository, file, asked))
        if repository in self.hung:
            self.over.wait()
            return
        content = self.files.get(repository, {}).get(file)
        if content is None:
            request.send_response(404)
            request.send_header("X-Error-Code", "EntryNotFound")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, whole = int(first or 0), content
        content = content[: int(last) + 1] if last else content
        request.send_response(206 if asked else 200)
        request.send_header("X-Repo-Commit", "c" * 40)
        request.send_header("ETag", f'"{hashlib.sha256(whole).hexdigest()}"')
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Length", str(len(content) - start))
        if asked:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(whole)}")
        request.end_headers()
        if not body:
            return
        stops = self.cut[1] if self.cut is not None and self.cut[0] == file else len(content)
        try:
            request.wfile.write(content[start:stops])
            request.wfile.flush()
        except OSError:
            return
        if stops < len(content):
            self.over.wait()

    def _list(self, request: BaseHTTPRequestHandler) -> None:
        """The files of a repository, as `list_repo_files` asks for them."""
        repository = request.path.removeprefix("/api/models/").partition("/tree/")[0]
        self.asked.append((request.command, repository, "", ""))
        names = self.files.get(repository, {})
        tree = [{"type": "file", "path": name, "size": len(names[name]), "oid": "0" * 40} for name in names]
        body = json.dumps(tree).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    @contextmanager
    def running(self) -> Iterator[Hub]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.over.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()
