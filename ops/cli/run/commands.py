"""The commands of a conversation, which begin with a slash."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from control.errors import SettingsError
from ops.cli.run.answer import AnswerFigures
from ops.cli.run.conversation import NAMES, Conversation, check_setting, read_setting
from ops.cli.run.served import ServedModel

DEFAULT = "default"


@dataclass
class Stats:
    """Counts of a conversation since its start; `last` are those of the latest answer."""

    answers: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    last: AnswerFigures = field(default_factory=AnswerFigures)

    def add(self, figures: AnswerFigures) -> None:
        """Count one answer."""
        self.answers, self.last = self.answers + 1, figures
        self.prompt_tokens += figures.prompt_tokens
        self.tokens += figures.tokens


@dataclass
class Commands:
    """Carries out commands on a conversation; each returns the lines to print."""

    served: ServedModel
    address: str
    conversation: Conversation
    stats: Stats

    def run(self, line: str) -> str | None:
        """The answer to a command, None for /bye. Raises SettingsError, and nothing is changed then."""
        name, _, rest = line.partition(" ")
        if name in ("/bye", "/exit", "/quit"):
            return None
        if name in ("/help", "/?"):
            return self._list()
        if name not in TABLE:
            return (
                f"'{name}' is no command. Begin a text with a space if its first character is a slash.\n{self._list()}"
            )
        return TABLE[name].act(self, rest.strip())

    def _list(self) -> str:
        width = max(len(command.usage) for command in TABLE.values())
        lines = [f"  {command.usage.ljust(width)}  {command.help}" for command in TABLE.values()]
        keys = '  """                text of several lines, until the next """'
        return "\n".join([*lines, keys, "  Ctrl-C ends an answer, Ctrl-D the conversation."])

    def set(self, rest: str) -> str:
        """Change a parameter, or show one or all."""
        name, _, text = rest.partition(" ")
        text = text.strip()
        assigned = self.conversation.settings
        if not name:
            return "\n".join(f"  {parameter}: {_shown(assigned, parameter)}" for parameter in NAMES)
        if name not in NAMES:
            check_setting(name, None)
        if text == DEFAULT:
            assigned.pop(name, None)
        elif text:
            assigned[name] = read_setting(name, text)
        return f"  {name}: {_shown(assigned, name)}"

    def system(self, rest: str) -> str:
        """Change the system prompt, or show it."""
        if not self.served.chat:
            raise SettingsError(f"{self.served.name} has no chat template, so it takes no system prompt.")
        if rest:
            self.conversation.system = "" if rest == DEFAULT else rest
        return f"  system: {self.conversation.system or 'none (that of the model, if it has one)'}"

    def show(self, rest: str) -> str:
        """Describe the model and the conversation."""
        conversation = self.conversation
        assigned = ", ".join(f"{name} {json.dumps(value)}" for name, value in conversation.settings.items())
        lines = [
            f"  model: {self.served.name}"
            + ("" if self.served.chat else " (no chat template: it continues each text)"),
            f"  context: {self.served.context or 'unknown'} tokens",
            f"  API: {self.address}",
            f"  system: {conversation.system or 'none'}",
            f"  settings: {assigned or 'those of the model'}",
            f"  messages: {len(conversation.messages)}",
        ]
        return "\n".join(lines)

    def save(self, rest: str) -> str:
        """Write the conversation to a file."""
        self.conversation.save(path := _path(rest, "/save FILE"))
        return f"  {path}: {len(self.conversation.messages)} messages saved."

    def load(self, rest: str) -> str:
        """Continue the conversation of a file."""
        model = self.conversation.load(path := _path(rest, "/load FILE"))
        other = f" The answers in it are of {model}." if model not in ("", self.served.name) else ""
        return f"  {path}: {len(self.conversation.messages)} messages loaded.{other}"

    def clear(self, rest: str) -> str:
        """Forget the messages."""
        count = len(self.conversation.messages)
        self.conversation.messages.clear()
        return f"  {count} messages forgotten; system prompt and settings stay."

    def show_stats(self, rest: str) -> str:
        """Counts of the conversation and of the latest answer."""
        stats = self.stats
        lines = [f"  answers: {stats.answers}, of {stats.prompt_tokens} prompt tokens and {stats.tokens} tokens"]
        return "\n".join([*lines, f"  latest: {in_words(stats.last)}"] if stats.answers else lines)


@dataclass(frozen=True, slots=True)
class _Command:
    usage: str
    help: str
    act: Callable[[Commands, str], str]


TABLE = {
    "/set": _Command("/set [NAME [VALUE]]", f"a parameter, such as temperature 0.7 or seed {DEFAULT}", Commands.set),
    "/system": _Command("/system [TEXT]", f"the system prompt; {DEFAULT}: none", Commands.system),
    "/show": _Command("/show", "model, settings and system prompt", Commands.show),
    "/save": _Command("/save FILE", "write the conversation as JSON", Commands.save),
    "/load": _Command("/load FILE", "continue a conversation that was saved", Commands.load),
    "/clear": _Command("/clear", "forget the messages", Commands.clear),
    "/stats": _Command("/stats", "tokens and tokens a second", Commands.show_stats),
    "/bye": _Command("/bye", "end", lambda _commands, _rest: ""),
}


def in_words(figures: AnswerFigures) -> str:
    """As `24 tokens, 38.2 tokens/s, first after 0.21 s`."""
    rate = f", {figures.rate:.1f} tokens/s" if figures.rate is not None else ""
    word = "token" if figures.tokens == 1 else "tokens"
    return f"{figures.tokens} {word}{rate}, first after {figures.first_s:.2f} s"


def _shown(assigned: dict[str, object], name: str) -> str:
    return json.dumps(assigned[name], ensure_ascii=False) if name in assigned else DEFAULT


def _path(rest: str, usage: str) -> Path:
    if not rest:
        raise SettingsError(f"a file is missing: {usage}")
    if "\0" in rest:
        raise SettingsError(f"{rest!r} is no path of a file: it has a NUL character")
    try:
        os.fsencode(rest)
        return Path(rest).expanduser()
    except (ValueError, RuntimeError) as error:  # half a character; ~NAME of an unknown user
        raise SettingsError(f"{rest!r} is no path of a file: {error}") from None
