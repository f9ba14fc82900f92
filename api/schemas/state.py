"""Answers of GET /v1/requests/<rid>, GET /v1/models, the process's own routes, and those around a stored response."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from api.schemas.answers import Shape
from api.schemas.generation import check_number
from api.schemas.view import decode_view
from control.errors import RequestError


class RequestStatus(msgspec.Struct, kw_only=True):
    """The state of a request. `times_ms`: Unix milliseconds, one for each phase that was reached."""

    id: str
    object: str = "request"
    model: str
    state: str
    endpoint: str
    created: int
    prompt_tokens: int
    completion_tokens: int
    priority: str
    attempts: int
    position: int | None
    """Place in the queue, from 1; null once it runs."""
    cause: str | None
    user: str | None
    metadata: dict[str, str]
    times_ms: dict[str, int]


def request_status(rid: str, model: str, fields: dict[str, str], position: int | None) -> RequestStatus:
    view = decode_view(fields["view"])
    return RequestStatus(
        id=rid,
        model=model,
        state=fields["state"],
        endpoint=view.endpoint,
        created=view.created,
        prompt_tokens=int(fields["prompt_tokens"]),
        completion_tokens=int(fields["seq"]) - int(fields.get("tokenless", 0)),
        priority=fields["priority"],
        attempts=int(fields.get("attempts", 0)),
        position=position,
        cause=fields.get("cause") or None,
        user=view.user,
        metadata=view.metadata,
        times_ms={name: int(value) for name, value in fields.items() if name.startswith("t_") and value},
    )


class ModelBackend(msgspec.Struct, kw_only=True):
    """The circumstances that the bits of an answer depend on. Where `batch_invariant` they are the only ones beside the
    request: neither other requests, nor chunks, nor threads change a token."""

    system_fingerprint: str
    replicas: int
    """The number of replicas with this backend."""
    weights: str
    """The fingerprint of the model's files."""
    dtype: str
    kv_type: str | None
    """The type of stored keys and values: `f32`, `f16`, `bf16`, `q8_0`, or a type of torch."""
    quant: str | None
    dequantize: bool
    tp: int
    collective: str | None
    """The transport of sums over ranks."""
    kernels: list[str]
    """Of each rank; one where all have the same."""
    batch_invariant: bool


class ModelCard(msgspec.Struct, kw_only=True):
    """A model and its state on the farm. During a change `rolled_out` of the wanted `replicas` serve its `revision`;
    `detail` says why a model is not loaded. OpenAI's clients read `created`, Anthropic's `created_at` and
    `display_name`.
    """

    id: str
    object: str = "model"
    type: str = "model"
    created: int
    created_at: str
    display_name: str
    lifecycle: str = "active"
    owned_by: str = "furrow"
    max_model_len: int | None = None
    max_input_tokens: int | None = None
    kind: str | None = None
    """`generate`, `embed` or `score`, once the model was loaded."""
    dimensions: int | None = None
    """Numbers of an embedding."""
    parent: str | None = None
    """Of MODEL:ADAPTER: the model."""
    engine: str | None = None
    """`furrow`, or the external engine that computes its tokens."""
    state: str | None = None
    detail: str | None = None
    revision: int | None = None
    replicas: int | None = None
    rolled_out: int | None = None
    system_fingerprint: str | None = None
    """That of all replicas; null where they differ, or none has loaded yet."""
    backends: list[ModelBackend] = []
    """Those of the replicas; one where all are equal."""


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool = True


class ChatList(msgspec.Struct, kw_only=True):
    """A page of stored chat completions, each as POST /v1/chat/completions answered it, with fields of its request."""

    object: str = "list"
    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredItems(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ChatMessages(StoredItems):
    """A page of the messages of a stored chat completion's request."""


class Version(msgspec.Struct, kw_only=True):
    version: str


class ServerLoad(msgspec.Struct, kw_only=True):
    server_load: int


class InputTokens(msgspec.Struct, kw_only=True):
    object: str = "response.input_tokens"
    input_tokens: int


class InputItems(StoredItems):
    """A page of a response's input items, in the forms of POST /v1/responses."""


Page = TypeVar("Page", bound=StoredItems)


def page_of(kind: type[Page], items: list[dict[str, Any]], order: str, after: str | None, limit: int) -> Page:
    """At most `limit` of the items, which were stored oldest first, behind the one whose id is `after`. Raises
    RequestError for an id that none has, and for a limit out of its range."""
    check_number("limit", limit)
    items = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise RequestError(f"'after' names '{after}', which is none of the items that are listed here.", param="after")
    start = ids.index(after) + 1 if after is not None else 0
    shown = ids[start : start + limit]
    return kind(
        data=items[start : start + limit],
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
        has_more=start + limit < len(items),
    )


class ModelList(msgspec.Struct, kw_only=True):
    """All models; there is never another page."""

    object: str = "list"
    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


class Health(Shape):
    status: Literal["ok", "draining"]


class ModelState(Shape):
    id: str
    state: str
    paused: bool
    detail: str


class RedisMemory(Shape):
    used_bytes: int
    max_bytes: int
    """0: no limit is set."""


class Readiness(Shape):
    ready: bool
    reason: str | None
    models: list[ModelState]
    redis: list[RedisMemory]
