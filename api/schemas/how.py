"""Marks and formats by which an answer is parsed; kept in the request's view for every API process."""

from __future__ import annotations

from typing import Literal

import msgspec

CallFormat = Literal["hermes", "qwen_xml", "llama3"]


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """The marks around a model's reasoning."""

    open: str = "<think>"
    close: str = "</think>"
    begun: bool = False
    """True if the prompt ends inside the reasoning: the answer begins with it and has no opening mark."""
    continued: bool = False
    """True if the prompt ends with a part of the reasoning itself."""
    hidden: bool = False
    """True if the client does not want to see it."""


class Calling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The format of the model's calls, and facts about the tools."""

    format: CallFormat
    names: list[str] = []
    literal: dict[str, list[str]] = {}
    """For formats without types: each function's parameters that are JSON; the others are text."""
    single: bool = False
    """True if only the first call counts (`parallel_tool_calls: false`)."""
    named: bool = False
    """True if the client named the function; then the end is "stop", as at OpenAI."""
    continued: bool = False
    """True if the prompt ends with a part of the answer."""
    begun: str = ""
    """The beginning of a call that stands at the end of the prompt: it is shown again, as a part of the call."""


class Reading(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parts of an answer besides text."""

    thinking: Thinking | None = None
    calling: Calling | None = None
    marks: dict[int, str] = {}
    """Special tokens, by id, that the parsers must see though their text is never shown."""
