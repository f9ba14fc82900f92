"""The console's files are served: which ones, with which headers, and to whom."""

from __future__ import annotations

import re

import httpx

from api.console.serving import FOLDER, read_files


def test_every_file_is_served_with_its_type_and_the_headers_of_a_closed_page(http: httpx.Client) -> None:
    """No file may run a script, be framed or be guessed to be of another type; none sets a cookie."""
    paths = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())
    assert {"style.css", "main.js", "lib/dom.js", "pages/farm.js", "icon.svg"} < set(paths)
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for path in ("", *paths):
        answer = http.get(f"/console/{path}")
        assert answer.status_code == 200, path
        kind = types[(path or "index.html").rpartition(".")[2]]
        assert answer.headers["content-type"].partition(";")[0] == kind
        assert answer.headers["cache-control"] == "no-cache" and "set-cookie" not in answer.headers
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_file_is_sent_again_only_when_it_changed(http: httpx.Client) -> None:
    """The browser asks each time, so an upgrade shows at once."""
    first = http.get("/console/style.css")
    again = http.get("/console/style.css", headers={"if-none-match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert http.get("/console/style.css", headers={"if-none-match": '"other"'}).content == first.content


def test_the_address_without_a_slash_leads_to_the_page(http: httpx.Client) -> None:
    """By a relative reference, so that a prefix of a proxy stays; no other path below it is a file."""
    moved = http.get("/console")
    assert (moved.status_code, moved.headers["location"]) == (307, "console/")
    for path in ("/console/none.js", "/console/lib", "/console/..%2f__init__.py", "/console/%2e%2e/files.py"):
        assert http.get(path).status_code == 404, path


def test_no_file_refers_to_another_server_or_holds_a_script_or_style_in_markup() -> None:
    """The policy would block it: a file that has it is a page that is broken."""
    for path, found in read_files().items():
        text = found.body.decode()
        assert set(re.findall(r"https?://[^\s\"'`<]+", text)) <= {"http://www.w3.org/2000/svg"}, path
        if path.endswith(".html"):
            assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\bsrc=)", text), path
        if path.endswith(".js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
            ), path
            assert all(name.startswith(".") for name in re.findall(r"^import .*? from \"([^\"]+)\"", text, re.M)), path
