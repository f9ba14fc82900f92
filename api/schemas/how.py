"""How an answer is to be read; kept in the request's view, so that every API process reads it alike."""

from __future__ import annotations

from typing import Literal

import msgspec

CallFormat = Literal["hermes", "qwen_xml", "llama3"]


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """The marks around a model's reasoning."""

    open: str = "<think>"
    close: str = "</think>"
    begun: bool = False
    """Whether the prompt ends inside the reasoning, so that the answer begins with it and has no opening mark."""
    hidden: bool = False
    """Whether the client does not want to see it."""


class Calling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the model writes its calls, and what is known about the tools."""

    format: CallFormat
    names: list[str] = []
    literal: dict[str, list[str]] = {}
    """For formats without types: the parameters of each function whose value is JSON; any other one's is text."""
    single: bool = False
    """Whether only the first call counts (`parallel_tool_calls: false`)."""
    named: bool = False
    """Whether the client named the function; then the end is "stop", as at OpenAI."""


class Reading(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that is to be found in an answer besides text."""

    thinking: Thinking | None = None
    calling: Calling | None = None
    marks: dict[int, str] = {}
    """Special tokens, by id, that the parsers must see though their text is never shown."""
