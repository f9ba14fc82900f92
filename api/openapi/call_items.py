"""Types of the calls of tools in the answers of /v1/responses for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from api.openapi.answers import Shape

Unset = UnsetType
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class FunctionCallItem(Shape, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | Unset = UNSET


class CustomToolCallItem(Shape, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | Unset = UNSET


class LocalShellCallItem(Shape, tag_field="type", tag="local_shell_call"):
    id: str
    status: ItemStatus
    call_id: str
    action: dict[str, Any]


class ShellCallItem(Shape, tag_field="type", tag="shell_call"):
    id: str
    status: ItemStatus
    call_id: str
    action: dict[str, Any]
    environment: dict[str, str]


class ApplyPatchCallItem(Shape, tag_field="type", tag="apply_patch_call"):
    id: str
    status: ItemStatus
    call_id: str
    operation: dict[str, str]


class CompactionItem(Shape, tag_field="type", tag="compaction"):
    """A summary of a conversation, for the client to send back in its place."""

    id: str
    encrypted_content: str


class InputText(Shape, tag_field="type", tag="input_text"):
    text: str


class UserMessageItem(Shape, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["user"]
    content: list[InputText]
