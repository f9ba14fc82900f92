"""Commands, requests and keys in documents exist."""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path

import click
import pytest

from ops.bench.__main__ import VERBS
from ops.cli import cli
from tests.unit.ops.command_line import parse
from tests.unit.ops.compose_file import ROOT
from worker.families.registry import FAMILIES

PAGES = sorted(path for folder in (".", "docs", "docs/decisions", "ops") for path in (ROOT / folder).glob("*.md"))
DOCUMENTS = [
    ROOT / name
    for name in ("CONTRIBUTING.md", "docs/deployment.md", "docs/performance.md", "ops/runbook.md", "ops/redis-cli.md")
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_furrow_command_is_understood(path: Path) -> None:
    """Command lines in code, up to a comment; placeholders count as values."""
    text = path.read_text()
    lines = re.findall(r"^(?:    )?(furrow .*)$", text, re.M)
    mentions = re.findall(r"`(furrow [^`]*)`", text)
    assert lines + mentions
    for line in lines:
        assert parse(cli, line.partition("  #")[0].split()[1:]), line
    for mention in mentions:
        # In prose a command may be named without what it needs, and may only ask for help.
        with contextlib.suppress(click.MissingParameter, click.exceptions.Exit):
            assert parse(cli, mention.split()[1:]), mention


def test_every_benchmark_of_a_page_is_a_program() -> None:
    """`python -m ops.bench.ROOM.NAME` in a page names a module with a command of that name, which knows the options."""
    mentions = {
        mention for page in PAGES for mention in re.findall(r"python -m (ops\.bench\.[a-z][^`#\n]*)", page.read_text())
    }
    assert len(mentions) > 15
    for mention in mentions:
        module, *arguments = mention.split()
        program = importlib.import_module(module)
        named = vars(program).get(module.rpartition(".")[2])
        command = named if isinstance(named, click.Command) else program.main
        assert 'if __name__ == "__main__":' in Path(str(program.__file__)).read_text(), module
        with contextlib.suppress(click.exceptions.Exit):
            parse(command, arguments)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_verb_of_furrow_bench_on_a_page_exists(path: Path) -> None:
    """Placeholders are capitals."""
    assert set(re.findall(r"furrow bench ([a-z]\w*)", path.read_text())) <= set(VERBS)


def test_the_page_of_figures_names_every_benchmark() -> None:
    """A module of ops/bench that runs a command and is no verb of `furrow bench`."""
    programs = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in (ROOT / "ops/bench").rglob("*.py")
        if re.search(r'\nif __name__ == "__main__":\n    (run|main)\(', path.read_text()) and path.name != "__main__.py"
    }
    assert len(programs) >= 15
    page = (ROOT / "docs/performance.md").read_text()
    assert [name for name in programs if f"`python -m {name}" not in page] == []


def test_the_runbook_asks_questions_that_the_sheet_answers() -> None:
    """Each quoted question begins a heading of ops/redis-cli.md."""
    headings = re.findall(r"^## (.*)$", (ROOT / "ops/redis-cli.md").read_text(), re.M)
    questions = re.findall(r'"([A-Z][^"]*\?)"', (ROOT / "ops/runbook.md").read_text().replace("\n", " "))
    assert len(questions) > 8
    for question in questions:
        core = re.sub(r"\s+", " ", question).rstrip("?")
        assert any(heading.startswith(core) for heading in headings), question


def test_the_runbook_lists_kinds_of_poison_that_are_written() -> None:
    """Every kind in its table is a literal of the code."""
    kinds = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?`) \|", (ROOT / "ops/runbook.md").read_text(), re.M)))
    code = "".join(path.read_text() for part in ("control", "worker") for path in (ROOT / part).rglob("*.py"))
    assert len(kinds) >= 8
    assert [kind for kind in kinds if f'"{kind}"' not in code] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(path: Path) -> None:
    """Paths in backticks from the root of the repository; NAME stands for any file."""
    for name in re.findall(r"`((?:control|worker|api|ops|tests|docs)/[\w./-]*)`", path.read_text()):
        assert "NAME" in name or (ROOT / name).exists(), name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Relative links name files that are there."""
    for target in re.findall(r"\]\((?!https?:)([^):#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_engine_page_lists_the_families_that_are_served() -> None:
    """The README sends readers there for the list, so it is the table's."""
    page = (ROOT / "docs/engine.md").read_text()
    rows = re.findall(r"^\| (?:dense types|types with \w+(?: layers)?) \| (.*?) \|$", page, re.M)
    assert sorted(re.findall(r"\w+", " ".join(rows))) == sorted(FAMILIES)
