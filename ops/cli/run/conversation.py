"""A conversation, the sampling parameters that `/set` takes, and the JSON file that `/save` writes and `/load`
reads."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from control.bounds import Range, refusal
from control.errors import SettingsError

FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
INTEGERS = ("top_k", "max_tokens", "min_tokens", "seed")
NAMES = (*FLOATS, *INTEGERS, "stop")
MOST_STOPS = 16
LONGEST_STOP = 1024
"""Characters."""
_MAX_TOKENS = Range(1, 2**31 - 1)


def read_setting(name: str, text: str) -> Any:
    """The value that the user wrote. Raises SettingsError naming the parameter, the value and what is accepted."""
    if name not in NAMES:
        raise SettingsError(f"'{name}' is no parameter. Use one of: {', '.join(NAMES)}.")
    if name == "stop":
        return check_setting(name, _stops(text))
    try:
        value = float(text) if name in FLOATS else int(text)
    except ValueError:
        kind = "a number" if name in FLOATS else "an integer"
        raise SettingsError(f"'{name}' must be {kind}, not {text!r}.") from None
    return check_setting(name, value)


def check_setting(name: str, value: Any) -> Any:
    """The value, if the API takes it. Raises SettingsError."""
    if name not in NAMES:
        raise SettingsError(f"'{name}' is no parameter. Use one of: {', '.join(NAMES)}.")
    if name == "stop":
        return _checked_stops(value)
    kinds = (int, float) if name in FLOATS else (int,)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise SettingsError(f"'{name}' must be {'a number' if name in FLOATS else 'an integer'}, not {value!r}.")
    if (text := refusal(name, value, _MAX_TOKENS if name == "max_tokens" else None)) is not None:
        raise SettingsError(text)
    return value


def _stops(text: str) -> Any:
    """A JSON list or string, where it is one; else the text itself."""
    if text.startswith(("[", '"')):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise SettingsError(f"'stop' {text!r} is no JSON: {error}.") from None
        return [value] if isinstance(value, str) else value
    return [text]


def _checked_stops(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise SettingsError("'stop' is a text, or a JSON list of texts such as " + r'["\n\n", "END"]' + ".")
    if len(texts) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in texts):
        raise SettingsError(f"'stop' may have {MOST_STOPS} texts of {LONGEST_STOP} characters.")
    return texts


# --- the conversation -------------------------------------------------------------------------------------------------


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
    conversation.settings = {name: check_setting(name, value) for name, value in assigned.items()}
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
