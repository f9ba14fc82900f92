"""No behaviour of docs/coverage.md is without a test. Attacks of docs/reliability.md and refusals name
theirs."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests.coverage_page import DOCS, FARM, TESTS, Module, first_clause, modules, name_of, read
from tests.rooms import ROOT, TOPS, rooms
from tests.subjects import SUBJECTS

PAGE = (ROOT / "docs/coverage.md").read_text()
REFUSED = PAGE.partition("\n## Not yet, and refused\n")[2].partition("\n## ")[0]
ATTACKS = (ROOT / "docs/reliability.md").read_text().partition("\n## Attacks\n")[2].partition("\n## ")[0]
MODULES = modules()


def rows(table: str) -> list[str]:
    """The rows below its head."""
    return [line for line in table.splitlines() if line.startswith("| ")][1:]


def named(table: str) -> dict[str, set[str]]:
    """File → the tests of every mention; a bare `::test` belongs to the file before it in its row."""
    tests = defaultdict[str, set[str]](set)
    for row in rows(table):
        file = ""
        for path, test in re.findall(r"([\w/]+\.py)?::(\w+|\*)", row):
            file = path or file
            tests[file].add(test)
    return tests


NAMED = named(REFUSED + ATTACKS)


@pytest.mark.parametrize("file", sorted(NAMED))
def test_every_test_that_it_names_exists(file: str) -> None:
    """A test that was renamed or dropped would leave a promise without its proof."""
    tests = read(TESTS / file).tests
    assert tests
    assert NAMED[file] - set(tests) - {"*"} == set()


@pytest.mark.parametrize(("table", "least"), [(ATTACKS, 15), (REFUSED, 5)], ids=["attacks", "refused"])
def test_every_row_names_a_test(table: str, least: int) -> None:
    """In its last cell."""
    assert len(rows(table)) >= least
    for row in rows(table):
        assert "::" in row.rstrip("| ").rpartition("|")[2], row


@pytest.mark.parametrize("owner", SUBJECTS)
def test_every_file_of_a_subject_is_there_once(owner: str) -> None:
    """A file that was renamed leaves no name behind, and no file is shown under two behaviours of its room."""
    names = [name for files in SUBJECTS[owner].values() for name in files.split()]
    assert len(names) == len(set(names))
    assert set(names) <= {name_of(module) for module in MODULES if module.owner == owner}
    for behaviour in SUBJECTS[owner]:
        assert 2 <= len(behaviour.split()) <= 14, behaviour


def test_every_file_of_tests_is_on_the_page() -> None:
    """Under the heading of the room that owns it."""
    sections = re.split(r"^### `?([\w/ ]+?)`?\n", PAGE, flags=re.M)
    page = {
        owner: set(re.findall(r"`(\w+)`", text)) for owner, text in zip(sections[1::2], sections[2::2], strict=True)
    }
    assert [module.path for module in MODULES if name_of(module) not in page[module.owner]] == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.path.relative_to(TESTS).as_posix())
def test_every_behaviour_has_its_tests_and_its_owner(module: Module) -> None:
    """The docstring of a file of tests begins with a few words that say the behaviour; its folder is there."""
    assert module.tests
    words = len(module.behaviour.split())
    assert 2 <= words <= 14, f"{words} words before the first `:`, `;` or `.` of its docstring, not 2 to 14"
    top, _, room = module.owner.partition("/")
    assert module.owner in (FARM, DOCS) or top in TOPS
    assert not room or room in rooms(top)


def test_no_behaviour_is_said_twice() -> None:
    """Two files that show the same thing of one folder would be one."""
    said = [(module.owner, module.behaviour) for module in MODULES]
    assert len(said) == len(set(said)) > 400


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("A lock is lost: its epoch ends.", "A lock is lost"),
        ('`truncation: "auto"` drops\nitems. More.', '`truncation: "auto"` drops items'),
        ("config.json is read; twice", "config.json is read"),
    ],
)
def test_a_row_is_the_first_clause(text: str, clause: str) -> None:
    assert first_clause(text) == clause
