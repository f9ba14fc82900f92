"""`truncation: "auto"` of /v1/responses: the oldest part of a conversation goes where it outgrows the context."""

from __future__ import annotations

from collections import defaultdict

from api.asgi.off_loop import off_loop
from api.generation.context.prompts import TOO_MUCH, count_tokens
from api.images.loading import RequestImages
from api.models.served import ServedModel
from api.schemas.converted import Converted
from api.schemas.item_parts import size_of
from api.schemas.items import MAX_ITEMS, Item
from api.schemas.responses import ResponseRequest, conversation
from api.schemas.tool_items import CALLS, RESULTS
from control.errors import RequestError

_ANSWER_SHARE = 4
"""Where something must go and the request sets no limit, one part in so many of the context is left for the answer."""
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
    steps, room = droppable(items), min(served.assets.context_length, served.assets.kv_tokens)

    def without(count: int) -> Converted:
        dropped = {index for step in steps[:count] for index in step}
        return conversation(body, [item for i, item in enumerate(items) if i not in dropped], stored=stored)

    fewest, most = await off_loop(size, _surely_dropped, items, steps, _MOST_CHARACTERS * room), len(steps)
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
    """How many steps must go because what is left would be too much, however it is tokenised."""
    sizes = [size_of(item) for item in items]
    gone: set[int] = set()
    characters = sum(sizes)
    for count, step in enumerate(steps):
        if characters <= most_characters and len(items) - len(gone) < MAX_ITEMS:
            return count
        characters -= sum(sizes[index] for index in step if index not in gone)
        gone.update(step)
    return len(steps)
