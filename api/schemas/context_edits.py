"""`context_management` of /v1/messages: which parts of a conversation are left out of the prompt."""

from __future__ import annotations

from typing import Literal

import msgspec

from api.schemas.decoding import Warnings

CLEAR_TOOL_USES = "clear_tool_uses_20250919"
CLEAR_THINKING = "clear_thinking_20251015"


class Amount(msgspec.Struct, kw_only=True):
    """A number of input tokens, of uses of tools, or of turns; or all."""

    type: str
    value: int = 0


class Edit(msgspec.Struct, kw_only=True):
    type: str
    trigger: Amount | None = None
    keep: Amount | Literal["all"] | None = None
    clear_at_least: Amount | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None

    @property
    def keeps_all(self) -> bool:
        return self.keep == "all" or (isinstance(self.keep, Amount) and self.keep.type == "all")

    def keep_count(self, default: int) -> int:
        """The number of newest uses or turns that are kept."""
        return max(0, self.keep.value) if isinstance(self.keep, Amount) else default

    def clears_input(self, tool: str) -> bool:
        """True if the arguments of a cleared use go too."""
        inputs = self.clear_tool_inputs
        return tool in inputs if isinstance(inputs, list) else bool(inputs)


class ContextManagement(msgspec.Struct, kw_only=True):
    edits: list[Edit] | None = None


def edits_of(management: ContextManagement | None, warnings: Warnings) -> list[Edit] | None:
    """The edits to apply, in their order; None where the request has no `context_management`."""
    if management is None:
        return None
    edits: list[Edit] = []
    for index, edit in enumerate(management.edits or []):
        if edit.type in (CLEAR_TOOL_USES, CLEAR_THINKING):
            edits.append(edit)
        else:
            at = f"context_management.edits[{index}].type"
            warnings.add(f"'{at}' '{edit.type}' has no effect: the conversation is kept as it was sent.", at)
    return edits
