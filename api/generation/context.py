"""Conversations that outgrow the context: `truncation: "auto"` of /v1/responses drops the oldest part, and the edits of
`context_management` clear parts and say what they cleared.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from api.generation.client_request import TOO_MUCH, count_tokens
from api.http.turns import off_loop
from api.images.loading import RequestImages
from api.models.models import ServedModel
from api.schemas.chat import CalledFunction, Message
from api.schemas.context_edits import CLEAR_THINKING, Edit
from api.schemas.converted import Converted
from api.schemas.items import CALLS, MAX_ITEMS, RESULTS, Item, size_of
from api.schemas.responses import ResponseRequest, conversation
from control.errors import RequestError

_ANSWER_SHARE = 4
"""The part of the context that is left for the answer if items are dropped and the request sets no limit: one in so
many."""
_ITEM_BYTES = 256
"""The least that an item counts for when the work is moved to a thread."""
_MOST_CHARACTERS = 32
"""Per token of context: beyond so many no text fits, so what is older than them is not even tokenised."""


async def fitted(
    body: ResponseRequest, items: list[Item], served: ServedModel, size: int, images: RequestImages, *, stored: bool
) -> Converted:
    """The chat request for as much of `items` as there is room for; whole where it fits, or where that is not wanted.

    `size`: of the body with the newest of them. `images`: those that are loaded. Raises as `conversation`; one that
    stays too long is refused later.
    """
    size += _ITEM_BYTES * len(items)
    if body.truncation != "auto":
        return await off_loop(size, conversation, body, items, stored=stored)
    steps = droppable(items)
    room = served.assets.most_tokens

    def without(count: int) -> Converted:
        dropped = {index for step in steps[:count] for index in step}
        return conversation(body, [item for i, item in enumerate(items) if i not in dropped], stored=stored)

    fewest = await off_loop(size, _surely_dropped, items, steps, _MOST_CHARACTERS * room)
    most = len(steps)
    request = await off_loop(size, without, fewest)
    if fewest == 0 and await _fits(request, served, size, images, room - (request.token_limit or 1)):
        return request
    most_tokens = room - (request.token_limit or room // _ANSWER_SHARE)
    while fewest < most:
        half = (fewest + most) // 2
        if await _fits(await off_loop(size, without, half), served, size, images, most_tokens):
            most = half
        else:
            fewest = half + 1
    return await off_loop(size, without, most)


async def _fits(request: Converted, served: ServedModel, size: int, images: RequestImages, room: int) -> bool:
    try:
        return await count_tokens(request, served, size, images) <= room
    except RequestError as error:
        if error.code not in TOO_MUCH:
            raise
        return False


def droppable(items: list[Item]) -> list[list[int]]:
    """Places of items that may be dropped, in the order in which they are; those of one step are dropped together.

    First whole turns, each from a user's message up to the next one, so that what is left begins with a user. Then of
    the last turn what the assistant said and called, a call never without its result. System messages stay, and so do
    the last question and the last step after it.
    """
    turns = _turns(items)
    steps = turns[:-1] + (_answers(items, turns[-1])[:-1] if turns else [])
    results: dict[str, list[int]] = defaultdict(list)
    for index, item in enumerate(items):
        if item["type"] in RESULTS:
            results[item["call_id"]].append(index)
    for step in steps:
        # A result may come later than in its call's own turn.
        calls = [items[index]["call_id"] for index in step if items[index]["type"] in CALLS]
        step += [index for call in calls for index in results[call] if index not in step]
    return steps


def _turns(items: list[Item]) -> list[list[int]]:
    turns: list[list[int]] = []
    asking = False
    for index, item in enumerate(items):
        if item.get("role") in ("system", "developer"):
            continue
        asks = item.get("role") == "user"
        if not turns or (asks and not asking):
            turns.append([])
        asking = asks
        turns[-1].append(index)
    return turns


def _answers(items: list[Item], turn: list[int]) -> list[list[int]]:
    """The items after the question of a turn, cut before everything that the assistant begins after a result."""
    steps: list[list[int]] = []
    after_result = True
    for index in turn:
        if items[index].get("role") == "user":
            continue
        is_result = items[index]["type"] in RESULTS
        if not steps or (after_result and not is_result):
            steps.append([])
        after_result = is_result
        steps[-1].append(index)
    return steps


def _surely_dropped(items: list[Item], steps: list[list[int]], most_characters: int) -> int:
    """The number of steps that must go because the rest would be too long, however it is tokenised."""
    sizes = [size_of(item) for item in items]
    dropped: set[int] = set()
    characters = sum(sizes)
    for count, step in enumerate(steps):
        if characters <= most_characters and len(items) - len(dropped) < MAX_ITEMS:
            return count
        characters -= sum(sizes[index] for index in step if index not in dropped)
        dropped.update(step)
    return len(steps)


CLEARED = "[The result of this call was cleared to save context.]"
# Anthropic's defaults.
_TRIGGER_TOKENS = 100_000
_KEPT_USES = 3
_KEPT_TURNS = 1


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

    original = 0
    tokens = 0
    applied = list[dict[str, Any]]()
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
        counter = "cleared_thinking_turns" if edit.type == CLEAR_THINKING else "cleared_tool_uses"
        applied.append({"type": edit.type, counter: cleared, "cleared_input_tokens": max(0, tokens - remaining)})
        request = shorter
        tokens = remaining
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
    turn = 0
    turns = list[int]()
    for message in messages:
        turn += message.role == "user"
        turns.append(turn)
    thought = sorted({turn for turn, message in zip(turns, messages, strict=True) if message.reasoning_content})
    keep = len(thought) if edit.keeps_all else edit.keep_count(_KEPT_TURNS)
    old = set(thought[: max(0, len(thought) - keep)])
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
    old = results[: max(0, len(results) - edit.keep_count(_KEPT_USES))]
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
