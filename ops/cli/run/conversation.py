"""A conversation, and the JSON file that `/save` writes and `/load` reads."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from control.errors import SettingsError
from ops.cli.run import settings

LARGEST = 64 * 2**20
"""Bytes of a file that `/load` reads."""
_ROLES = ("user", "assistant")


@dataclass
class Conversation:
    """`messages` are the user's and the model's, in turns; `settings` are parameters of the requests."""

    model: str
    chat: bool = True
    """False for a model without a chat template: each text is continued alone."""
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def request(self, text: str) -> dict[str, Any]:
        """The body of a request whose last message is `text`."""
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **self.settings}
        if not self.chat:
            return body | {"prompt": text}
        begin = [{"role": "system", "content": self.system}] if self.system else []
        return body | {"messages": [*begin, *self.messages, {"role": "user", "content": text}]}

    def add(self, text: str, answer: str) -> None:
        """Append one turn."""
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def save(self, path: Path) -> None:
        """Write the file, readable by this user only. Raises SettingsError; a file that is no conversation stays."""
        try:
            exists = path.exists()
        except OSError as error:  # a folder that may not be entered, a name that is too long
            raise SettingsError(f"{path} can't be written: {error.strerror}.") from None
        if exists:
            try:
                _read(path)
            except SettingsError:
                raise SettingsError(f"{path} exists and is no conversation. Name another file.") from None
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = {"model": self.model, "settings": self.settings, "messages": [*system, *self.messages]}
        try:
            _replace(path, json.dumps(content, ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise SettingsError(f"{path} can't be written: {error.strerror}.") from None
        except ValueError as error:  # half a character, which JSON can have and UTF-8 can't
            raise SettingsError(f"{path} can't be written: {error}.") from None

    def load(self, path: Path) -> str:
        """Continue the conversation of the file; the name of its model. Raises SettingsError and changes nothing."""
        conversation = _read(path)
        self.system = conversation.system
        self.settings = conversation.settings
        self.messages = conversation.messages
        return conversation.model


def _read(path: Path) -> Conversation:
    try:
        if path.stat().st_size > LARGEST:
            raise SettingsError(f"{path} is larger than {LARGEST // 2**20} MiB.")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} can't be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} is no JSON: {error}.") from None
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list):
        raise SettingsError(f"{path} is no conversation: it has no list 'messages'.")
    conversation = Conversation(model=str(content.get("model") or ""))
    for place, message in enumerate(messages):
        role, text = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(text, str) or (role not in _ROLES and (role, place) != ("system", 0)) or role is None:
            raise SettingsError(
                f"{path}: message {place + 1} must have the role user or assistant (the first one system, too) and a "
                "text as content."
            )
        if role == "system":
            conversation.system = text
        else:
            conversation.messages.append({"role": role, "content": text})
    assigned = content.get("settings", {})
    if not isinstance(assigned, dict):
        raise SettingsError(f"{path}: 'settings' must be an object.")
    conversation.settings = {name: settings.check(name, value) for name, value in assigned.items()}
    return conversation


def _replace(path: Path, text: str) -> None:
    """Write the whole file or nothing; mkstemp makes files that only this user can read."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
