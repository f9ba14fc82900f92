"""Verdicts on clients' runs and their page: the acceptance tests install and run the clients."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ops.compat
from ops.compat import clients
from ops.compat.clients import CLIENTS, Client
from ops.compat.runs import CheckResult, ClientRun, Reference, compared, page, run

CLIENT = Client(name="c", title="A client", packages=("c[x]",), script="c.py", gaps={"b": "it is not served"})


def of(*results: CheckResult) -> ClientRun:
    return ClientRun(CLIENT, "1.0", list(results))


@pytest.mark.parametrize(
    ("results", "faults"),
    [
        ([CheckResult("a", True), CheckResult("b", False, "404")], []),
        ([CheckResult("a", False, "500"), CheckResult("b", False)], ["a: 500"]),
        ([CheckResult("a", True), CheckResult("b", True)], ["b: is listed as a gap, and works"]),
        ([CheckResult("a", True)], ["b: is listed as a gap, and was not tried"]),
    ],
)
def test_what_contradicts_the_gaps(results: list[CheckResult], faults: list[str]) -> None:
    """A failure that nobody told, and a gap that is none any more."""
    assert of(*results).faults == faults


def test_the_page_counts_checks_and_names_gaps() -> None:
    """With the reason of each gap."""
    text = page([of(CheckResult("a", True), CheckResult("b", False, "404"))])
    assert "\n| A client | 1.0 | 1 of 2 | b: it is not served |\n" in text


def test_a_failure_that_is_no_gap_is_no_working_check() -> None:
    text = page(
        [
            of(
                CheckResult("test_1", True),
                CheckResult("test_2", True),
                CheckResult("test_3", False, "404"),
                CheckResult("a", True),
            )
        ]
    )
    assert "\n| A client | 1.0 | 3 of 4 |" in text


def test_every_client_has_its_script_and_is_on_the_page() -> None:
    """The page was written of all of them, with the gaps that are known now."""
    text = (Path(ops.compat.__file__).parents[2] / "docs" / "compatibility.md").read_text()
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)
    for client in CLIENTS:
        assert (clients.SCRIPTS / client.script).is_file()
        [row] = [line for line in text.splitlines() if line.startswith(f"| {client.title} |")]
        assert row.endswith(f"| {'; '.join(f'{check}: {why}' for check, why in client.gaps.items()) or '–'} |")


SCRIPT = """\
from checks import check, main

@check("plain")
def plain():
    assert True

@check("async")
async def later():
    raise ValueError("no")

main()
"""


def test_a_script_s_lines_are_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check is told, an asynchronous one too; a script that dies says why."""
    (tmp_path / "checks.py").write_text((clients.SCRIPTS / "checks.py").read_text())
    (tmp_path / "c.py").write_text(SCRIPT)
    monkeypatch.setattr(clients, "command", lambda client: [sys.executable, str(tmp_path / "c.py")])
    results = run(CLIENT, "http://127.0.0.1:1/v1", "m").results
    assert [(result.check, result.ok) for result in results] == [("plain", True), ("async", False)]
    assert results[1].detail.startswith("ValueError: no")
    (tmp_path / "c.py").write_text("raise SystemExit('gone')")
    [last] = run(CLIENT, "http://127.0.0.1:1/v1", "m").results
    assert (last.ok, last.detail) == (False, "gone\n")


def test_a_run_about_a_form_is_the_loop_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name of the form, so that the page tells the loops apart."""
    (tmp_path / "checks.py").write_text((clients.SCRIPTS / "checks.py").read_text())
    loop = "chat: a tool call, its result, and a second turn"
    (tmp_path / "c.py").write_text(SCRIPT.replace('"plain"', f'"{loop}"'))
    monkeypatch.setattr(clients, "command", lambda client: [sys.executable, str(tmp_path / "c.py")])
    assert [result.check for result in run(CLIENT, "http://127.0.0.1:1/v1", "m").results] == [loop, "async"]
    [only] = run(CLIENT, "http://127.0.0.1:1/v1", "m", form="glm").results
    assert (only.check, only.ok) == (f"glm: {loop}", True)


def test_environments_are_in_the_folder_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable names the folder; half an installation is none."""
    monkeypatch.setenv(clients.FOLDER, str(tmp_path))
    assert clients.folder(CLIENT) == tmp_path / "c"
    assert "python -m ops.compat install c" in (clients.missing(CLIENT) or "")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "installed.json").write_text('{"version": "1.0"}')
    assert clients.version(CLIENT) == "1.0" and clients.missing(CLIENT) is None


def test_a_program_of_node_is_driven_by_a_script_of_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script gets the folder of the program; a package's version is no part of its name."""
    monkeypatch.setenv(clients.FOLDER, str(tmp_path))
    program = Client(name="p", title="P", kind="node", packages=("@org/p@latest",), script="codex.py")
    assert program.package == "@org/p"
    assert clients.command(program) == [sys.executable, str(clients.SCRIPTS / "codex.py")]
    assert clients.programs(program) == tmp_path / "p" / "node_modules" / ".bin"
    assert clients.programs(CLIENT) == tmp_path / "c" / "bin"


def test_likelihoods_must_equal_transformers() -> None:
    """With transformers' own of the demonstration model, to 1e-3; none at all is a failure."""
    right = Reference().log_likelihood("One two", " three")
    assert -60 < right < 0
    assert compared([["One two", " three", right + 9e-4]]).ok
    wrong = compared([["One two", " three", right], ["One two", " three", right - 2e-3]])
    assert not wrong.ok and "apart at 'One two' + ' three'" in wrong.detail
    assert not compared([]).ok
