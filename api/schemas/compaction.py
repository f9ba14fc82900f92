"""Compaction: the model's own summary takes the place of a conversation, for POST /v1/responses/compact and for an
item `compaction_trigger` at the end of an input.

The summary is an item that is sealed for the client, which sends it back in place of what it stands for.
"""

from __future__ import annotations

from typing import Any

import msgspec

from api.schemas.items import Item, Unseal, without_images
from api.schemas.responses import ResponseRequest

SUMMARY_TOKENS = 2048
_CONTEXT_SHARE = 4
"""A summary takes at most one part in so many of the context."""
_KEPT_CHARACTERS = 32_768
"""Of the newest messages of the user, which stand beside the summary word for word."""


def is_compaction(items: list[Item]) -> bool:
    """True for a conversation that is to be summarised."""
    return bool(items) and items[-1]["type"] == "compaction_trigger"


def summarising(request: ResponseRequest, context_length: int) -> ResponseRequest:
    """The request as it is put to the model: free text of a bounded length, and no tools."""
    most = min(SUMMARY_TOKENS, max(1, context_length // _CONTEXT_SHARE))
    return msgspec.structs.replace(
        request,
        max_output_tokens=min(request.max_output_tokens or most, most),
        truncation="auto",
        tools=None,
        tool_choice=None,
        text=None,
        include=None,
        top_logprobs=None,
    )


def kept_messages(items: list[Item]) -> list[Item]:
    """The user's newest messages, as many as are kept whole, without their images."""
    messages: list[Item] = []
    characters = 0
    for item in reversed(items):
        if item["type"] != "message" or item["role"] != "user":
            continue
        item = without_images(item)
        characters += sum(len(part["text"]) for part in item["content"])
        if characters > _KEPT_CHARACTERS:
            break
        messages.append(item)
    return messages[::-1]


def since_compaction(items: list[Item]) -> list[Item]:
    """The items that the newest summary does not stand for, and the messages beside it, without their images."""
    places = [index for index, item in enumerate(items) if item["type"] == "compaction"]
    if not places:
        return items
    before = [item for item in items[: places[-1]] if item["type"] == "message" and item["role"] != "assistant"]
    return [*map(without_images, before), *items[places[-1] :]]


def with_summaries(output: list[Item], unseal: Unseal) -> list[Item]:
    """The output of a stored response, its summaries opened."""
    return [_opened(item, unseal) if item["type"] == "compaction" else item for item in output]


def _opened(item: Item, unseal: Unseal) -> dict[str, Any]:
    return item | {"summary": unseal("compaction", item["encrypted_content"]) or ""}
