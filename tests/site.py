"""A hook of mkdocs: pages that lie outside docs/ belong to the site too, and links to them lead there."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "ops/runbook.md": "ops/runbook.md",
    "ops/redis-cli.md": "ops/redis-cli.md",
}
"""Pages of the site outside docs/: their file in the repository."""
DECISIONS = "decisions/index.md"
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#|/)([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, DECISIONS, content=_decisions()))
    return files


def _decisions() -> str:
    """A page with the title of each decision."""
    lines = [
        f"- [{file.read_text(encoding='utf-8').partition(chr(10))[0].removeprefix('# ')}]({file.name})"
        for file in sorted((ROOT / "docs/decisions").glob("*.md"))
    ]
    return "# Design decisions\n\n" + "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of a repository's file, as links of the site. Files that are no page are named without a link."""
    place = page.file.src_uri
    source = ROOT / ELSEWHERE.get(place, f"docs/{place}")

    def moved(link: re.Match[str]) -> str:
        target = (source.parent / link[1]).resolve()
        named = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else link[1]
        named = f"docs/{DECISIONS}" if named == "docs/decisions" else named
        uri = next((uri for uri, file in ELSEWHERE.items() if file == named), named.removeprefix("docs/"))
        return uri if place.count("/") == 0 else "../" * place.count("/") + uri

    lines = _LINK.sub(moved, markdown)
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)*ops/(?:grafana|prometheus|docker)[^)]*\)", r"\1", lines)
