"""Settings and commands of a conversation: files too; what is wrong is named, and changes nothing."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from control.errors import SettingsError
from ops.cli.run.answer import AnswerFigures
from ops.cli.run.commands import TABLE, Commands, Stats
from ops.cli.run.conversation import Conversation, read_setting
from ops.cli.run.served import ServedModel


@pytest.fixture
def commands() -> Commands:
    conversation = Conversation(model="m", system="Be brief.", settings={"seed": 7})
    conversation.add("Hello", "Hi.")
    return Commands(ServedModel("m", True, 100), "http://here", conversation, Stats())


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.7", 0.7),
        ("max_tokens", "12", 12),
        ("seed", "-3", -3),
        ("stop", "END of it", ["END of it"]),
        ("stop", r'["\n\n", "END"]', ["\n\n", "END"]),
        ("stop", r'"\n"', ["\n"]),
    ],
)
def test_a_parameter_is_read(name: str, text: str, value: object) -> None:
    assert read_setting(name, text) == value


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("/set temperature 6", "temperature': 6.0 must be between 0 and 5"),
        ("/set temperature nan", "must be between"),
        ("/set temperature warm", "'warm'"),
        ("/set max_tokens 0", "between 1 and"),
        ("/set max_tokens 1.5", "an integer"),
        ("/set seed 99999999999999999999999", "'seed'"),
        ("/set heat 1", "temperature, top_p"),
        ("/set stop [1]", "list of texts"),
        ("/set stop [", "no JSON"),
        ("/save", "/save FILE"),
        ("/load /nowhere/at/all", "/nowhere/at/all"),
        ("/save /nowhere/at/all", "can't be written"),
        ("/save /" + "n" * 300, "File name too long"),
        ("/load /" + "n" * 300, "File name too long"),
        ("/save ~no-such-user", "no path"),
        ("/load ~no-such-user", "no path"),
        ("/save /tmp/\0", "NUL"),
        ("/save /tmp/\ud800", "no path"),
    ],
)
def test_a_wrong_value_is_named_and_changes_nothing(commands: Commands, line: str, named: str) -> None:
    before = copy.deepcopy(commands.conversation)
    with pytest.raises(SettingsError, match=r"(?s)^.*" + named.replace("(", r"\(")):
        commands.run(line)
    assert commands.conversation == before


def test_an_unknown_command_lists_them(commands: Commands) -> None:
    told = commands.run("/x") or ""
    assert "'/x' is no command" in told
    assert all(usage in told for usage in TABLE)
    assert commands.run("/bye") is None


def test_settings_and_system_go_into_the_request(commands: Commands) -> None:
    """A default value leaves it again."""
    for line in ("/set temperature 0", "/set stop END", "/set seed default", "/system Be long."):
        commands.run(line)
    body = commands.conversation.request("Next")
    assert (body["temperature"], body["stop"]) == (0.0, ["END"]) and "seed" not in body
    assert [one["content"] for one in body["messages"]] == ["Be long.", "Hello", "Hi.", "Next"]
    commands.run("/system default")
    commands.run("/clear")
    assert commands.conversation.request("Next")["messages"] == [{"role": "user", "content": "Next"}]


def test_a_model_without_a_template_continues_the_text() -> None:
    """Earlier turns and a system prompt are no part of it."""
    conversation = Conversation(model="m", chat=False)
    conversation.add("a", "b")
    assert conversation.request("c")["prompt"] == "c"
    commands = Commands(ServedModel("m", False, None), "http://here", conversation, Stats())
    with pytest.raises(SettingsError, match="no chat template"):
        commands.run("/system x")


def test_a_saved_conversation_is_loaded(commands: Commands, tmp_path: Path) -> None:
    """With system prompt and settings, by this user alone; it may be written again."""
    file = tmp_path / "c.json"
    for _ in range(2):
        commands.run(f"/save {file}")
    assert file.stat().st_mode & 0o777 == 0o600
    other = Commands(ServedModel("n", True, 100), "", Conversation(model="n"), Stats())
    assert "2 messages loaded. The answers in it are of m." in (other.run(f"/load {file}") or "")
    saved, found = commands.conversation, other.conversation
    assert (found.model, found.system, found.settings, found.messages) == (
        "n",
        "Be brief.",
        {"seed": 7},
        saved.messages,
    )


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"messages": 3}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "robot", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}',
        '{"messages": [], "settings": {"temperature": 9}}',
        '{"messages": [], "settings": {"temperature": true}}',
        '{"messages": [], "settings": []}',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_no_conversation_is_neither_loaded_nor_overwritten(
    commands: Commands, tmp_path: Path, content: str
) -> None:
    file, before = tmp_path / "c.json", copy.deepcopy(commands.conversation)
    file.write_text(content)
    with pytest.raises(
        SettingsError, match=str(file) if "9" not in content and "true" not in content else "temperature"
    ):
        commands.run(f"/load {file}")
    assert commands.conversation == before
    with pytest.raises(SettingsError, match="is no conversation"):
        commands.run(f"/save {file}")
    assert file.read_text() == content


def test_a_folder_that_may_not_be_entered_is_named(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may enter each, so that the refusal is the kernel's in words only."""

    def refuse(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(SettingsError, match=r"/x can't be written: Permission denied\."):
        commands.run("/save /x")


def test_half_a_character_is_not_saved(commands: Commands, tmp_path: Path) -> None:
    commands.conversation.add("\ud800", "Hi.")
    with pytest.raises(SettingsError, match="can't be written"):
        commands.run(f"/save {tmp_path}/c.json")
    assert list(tmp_path.iterdir()) == []


def test_stats_add_up(commands: Commands) -> None:
    commands.stats.add(AnswerFigures(first_s=1.0, last_s=3.0, prompt_tokens=10, tokens=21))
    told = commands.run("/stats") or ""
    assert "10 prompt tokens and 21 tokens" in told and "10.0 tokens/s" in told
    assert json.loads(json.dumps(commands.conversation.settings)) == {"seed": 7}
