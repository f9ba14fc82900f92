"""Applies the edits of `context_management` to a conversation before its prompt is made, and says what they cleared."""

from __future__ import annotations

from typing import Any

import msgspec

from api.generation.context.prompts import TOO_MUCH, count_tokens
from api.images.loading import RequestImages
from api.models.served import ServedModel
from api.schemas.chat import CalledFunction, Message
from api.schemas.context_edits import CLEAR_THINKING, Edit
from api.schemas.converted import Converted
from control.errors import RequestError

CLEARED = "[The result of this call was cleared to save context.]"
_TRIGGER_TOKENS, _KEPT_USES, _KEPT_TURNS = 100_000, 3, 1
"""Anthropic's defaults."""


async def edited(request: Converted, served: ServedModel, size: int, images: RequestImages) -> tuple[Converted, int]:
    """The conversation after its edits, with `applied_edits` among the facts that are told back; and its own tokens.

    Tokens are counted only where an edit finds something to clear; else they are 0. `size`: of the request's body;
    `images`: those that are loaded.
    """

    async def count(shortened: Converted) -> int:
        try:
            return await count_tokens(shortened, served, size, images)
        except RequestError as error:
            if error.code not in TOO_MUCH:
                raise
            return served.assets.context_length + 1

    original, tokens, applied = 0, 0, list[dict[str, Any]]()
    for edit in request.edits or []:
        messages, cleared = (_thinking if edit.type == CLEAR_THINKING else _uses)(request.messages, edit)
        if not cleared:
            continue
        tokens = tokens or await count(request)
        original = original or tokens
        if edit.type != CLEAR_THINKING and not _triggered(edit, request.messages, tokens):
            continue
        shorter = msgspec.structs.replace(request, messages=messages)
        remaining = await count(shorter)
        if edit.clear_at_least is not None and tokens - remaining < edit.clear_at_least.value:
            continue
        what = "cleared_thinking_turns" if edit.type == CLEAR_THINKING else "cleared_tool_uses"
        applied.append({"type": edit.type, what: cleared, "cleared_input_tokens": max(0, tokens - remaining)})
        request, tokens = shorter, remaining
    if request.edits is None:
        return request, original
    return msgspec.structs.replace(request, extra_fields=request.extra_fields | {"applied_edits": applied}), original


def _triggered(edit: Edit, messages: list[Message], tokens: int) -> bool:
    trigger = edit.trigger
    if trigger is not None and trigger.type == "tool_uses":
        return sum(len(message.tool_calls or []) for message in messages) > trigger.value
    return tokens > (trigger.value if trigger is not None else _TRIGGER_TOKENS)


def _thinking(messages: list[Message], edit: Edit) -> tuple[list[Message], int]:
    """The messages without the reasoning of all but the newest turns that have any; and the number of these."""
    turn, turns = 0, list[int]()
    for message in messages:
        turn += message.role == "user"
        turns.append(turn)
    thought = sorted({turn for turn, message in zip(turns, messages, strict=True) if message.reasoning_content})
    kept = len(thought) if edit.keeps_all else edit.kept(_KEPT_TURNS)
    old = set(thought[: max(0, len(thought) - kept)])
    shorter = [
        msgspec.structs.replace(message, reasoning_content=None, content=message.content or "")
        if message.reasoning_content and turn in old
        else message
        for turn, message in zip(turns, messages, strict=True)
    ]
    return shorter, len(old)


def _uses(messages: list[Message], edit: Edit) -> tuple[list[Message], int]:
    """The messages with a note in place of results, newest uses and excluded tools apart; and the number of notes."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls or [] if call.function}
    results = [message.tool_call_id for message in messages if message.role == "tool" and message.tool_call_id]
    old = results[: max(0, len(results) - edit.kept(_KEPT_USES))]
    cleared = {identity for identity in old if names.get(identity) not in (edit.exclude_tools or [])}
    cleared -= {message.tool_call_id for message in messages if message.content == CLEARED}
    return [_cleared(message, cleared, names, edit) for message in messages], len(cleared)


def _cleared(message: Message, cleared: set[str], names: dict[str, str], edit: Edit) -> Message:
    if message.role == "tool" and message.tool_call_id in cleared:
        return msgspec.structs.replace(message, content=CLEARED)
    calls = list(message.tool_calls or [])
    for index, call in enumerate(calls):
        if call.id in cleared and edit.clears_input(names[call.id]):
            calls[index] = msgspec.structs.replace(call, function=CalledFunction(name=names[call.id]))
    return msgspec.structs.replace(message, tool_calls=calls) if calls else message
