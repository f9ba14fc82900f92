"""A request enters its tenant's queue with its images, or joins the one that runs under the same idempotency key.

The pixels of the images are written in pieces before the request is queued: a hash beside the request has a field
`image:piece` for each. Its life is that of the request; before the request is queued it is STAGED_MS.
"""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from control.errors import IdempotencyConflict, ImagesFull, QueueFull, RedisUnavailable, RequestError
from control.keys import CLASSES, ModelKeys
from control.messages import GenerationRequest, LogEntry, encode
from control.redis.connection import Call, Steps, read_bytes
from control.requests.token_log import stage

PIECE_BYTES = 768 * 1024
"""Pixels of one piece: a round trip of a few milliseconds, far below the time-outs of connections."""

Pieces = Sequence[bytes]
"""The pieces of one image."""


def piece_count(size: int) -> int:
    """Into how many pieces `size` bytes are cut."""
    return -(-size // PIECE_BYTES)


def pieces_of(pixels: bytes) -> list[bytes]:
    """The pixels of an image in pieces."""
    return [pixels[at : at + PIECE_BYTES] for at in range(0, len(pixels), PIECE_BYTES)]


class ImageBounds(msgspec.Struct, frozen=True):
    """Bytes that the images of requests which have not ended may take in Redis."""

    model: int
    """All of a model; 0: any number."""
    tenant: int
    """Those of one tenant."""


ANY_BYTES = ImageBounds(0, 0)
"""For a request that Redis had and lost."""


def stage_images(model: str, rid: str, images: Sequence[Pieces], tenant: str, bounds: ImageBounds) -> list[Call[int]]:
    """Calls that write the images of a request that is not queued yet, one for each piece, in their order.

    Each returns the number of pieces that are there. The first raises ImagesFull where others take what there is, and
    RequestError where the images alone are too large.
    """
    keys = ModelKeys(model)
    total = sum(len(piece) for pieces in images for piece in pieces)

    def parse(reply: list[Any]) -> int:
        if not reply[1]:
            return int(reply[0])
        most = bounds.model if reply[1] == "model" else bounds.tenant
        if total > (alone := min(bounds.model, bounds.tenant)):
            raise RequestError(
                f"The images take {total} bytes as the model takes them, and at most {alone} are held for a tenant. "
                "Send fewer or smaller images.",
                code="too_many_images",
            )
        raise ImagesFull(model, reply[1], int(reply[2]), most)

    head = (keys.base, rid, tenant, total, bounds.model, bounds.tenant)
    return [
        Call("stage_image", (keys.images(rid), keys.image_bytes), (*head, f"{image}:{place}", piece), parse)
        for image, pieces in enumerate(images)
        for place, piece in enumerate(pieces)
    ]


def read_image(model: str, rid: str, image: int, size: int) -> list[Call[bytes | None]]:
    """Calls that read an image of `size` bytes, one for each piece; a piece that is gone is None."""
    key = ModelKeys(model).images(rid)
    return [read_bytes("HGET", key, f"{image}:{piece}", parse=_piece) for piece in range(piece_count(size))]


def _piece(reply: bytes | None) -> bytes | None:
    return reply


DEFAULT_DEADLINE_MS = 24 * 3_600_000
"""Deadline of a request without one: longer than any answer takes, and not endless."""

_WORD = re.compile(r"[A-Za-z0-9._-]{1,200}")
_MEMBERS = uuid.UUID("5f2a0d0e-2f0f-5c3e-9a1b-6b7c3d1e4f50")


def new_rid() -> str:
    """A fresh request id."""
    return uuid.uuid4().hex


def member_rid(first: str, member: int) -> str:
    """Request id of prompt `member` of a list; derived, so that any process knows them all from the first."""
    return first if member == 0 else uuid.uuid5(_MEMBERS, f"{first}:{member}").hex


class Enqueue(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the queue. `rid` is fresh and unique: a uuid, never a client's text."""

    rid: str
    model: str
    params: GenerationRequest
    images: list[list[bytes]] = []
    """The pieces of each image of `params`, which `stage_images` has written."""
    tenant: str
    account: str = ""
    """The id of the API key under which usage is counted; "" for none."""
    hold: str = ""
    """The id under which its API key's limits were taken, and are settled; "" for a key without limits."""
    priority: str = "normal"
    deadline_ms: int = 0
    """From now; 0: a day."""
    on_disconnect: str = "cancel"
    """cancel, continue, or seconds to wait for a new follower."""
    api: str = ""
    """Id of the API process that follows it; "" for nobody."""
    idempotency_key: str = ""
    body_hash: str = ""
    view: str = ""
    """Opaque JSON of the API: what it needs to continue the answer on another process."""
    received_ms: int = 0
    max_queued_requests: int = 10_000
    max_queued_tokens: int = 100_000_000
    max_queue_wait_ms: int = 0
    """Refused where the measured drain rate lets expect a longer wait; 0: however long."""
    keep_ms: int = 0
    """Time for which its prompt and log are kept after its end, to compute it again; 0: the prompt is dropped."""
    lost: bool = False
    """It was accepted before, and Redis has lost it: no bound refuses it, and its key joins it to no other request."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    """`rid` differs from the one sent when it joined another; `position` counts from 1 in order of arrival."""

    rid: str
    joined: bool
    position: int


@dataclass(frozen=True, slots=True)
class _Staged:
    """A log that lies beside, for a request that has none yet: `tokenless` entries of it have no token."""

    key: str = ""
    entries: int = 0
    tokenless: int = 0
    ended: str = ""


def enqueue(request: Enqueue) -> Call[Enqueued]:
    """Raises QueueFull, IdempotencyConflict, or RequestError for a value that can't be carried."""
    return _enqueue(request, _Staged())


def enqueue_again(request: Enqueue, delivered: Sequence[LogEntry]) -> Steps[Enqueued]:
    """After a loss of data: with what the client has already, from seq 1, as the beginning of the log.

    Where another process was first the log is what it had delivered; `repair` adds to that. Raises as `enqueue`, and
    RedisUnavailable.
    """
    yield from stage_images(request.model, request.rid, request.images, request.tenant, ANY_BYTES)
    count = len(delivered)  # it may grow meanwhile
    if not count:
        return (yield enqueue(request))
    key = ModelKeys(request.model).staged(request.rid, secrets.token_hex(8))
    without, ended = yield from stage(key, delivered, count)
    return (yield _enqueue(request, _Staged(key, count, without, ended)))


def _enqueue(request: Enqueue, staged: _Staged) -> Call[Enqueued]:
    _check(request)
    keys = ModelKeys(request.model)
    params = _with_seed(request.params)
    deadline_ms = request.deadline_ms or DEFAULT_DEADLINE_MS

    def parse(reply: list[Any]) -> Enqueued:
        if reply[0] == "BUSY":
            raise QueueFull(request.model, int(reply[1]), float(reply[2]), reply[3])
        if reply[0] == "LAPSED":
            raise RedisUnavailable(f"The staged data of {request.rid} lapsed before it was used; try again")
        if reply[0] == "CONFLICT":
            raise IdempotencyConflict(
                f"The Idempotency-Key {request.idempotency_key!r} was used with another body (request {reply[1]}). "
                "Use a new key for a new request.",
                code="idempotency_conflict",
            )
        return Enqueued(rid=reply[1], joined=bool(reply[2]), position=int(reply[3]))

    args = (
        *(keys.base, request.rid, request.tenant, request.priority),
        *(len(params.prompt), params.sampling.n, params.sampling.seed),
        *(deadline_ms, request.on_disconnect, request.api, request.idempotency_key, request.body_hash),
        *(encode(params), request.view, request.received_ms),
        *(request.max_queued_requests, request.max_queued_tokens, request.max_queue_wait_ms),
        *(staged.tokenless, int(request.lost), request.account, request.hold, staged.ended, staged.entries),
        request.keep_ms,
        sum(len(pieces) for pieces in request.images),
    )
    return Call("enqueue", (keys.load, staged.key or keys.staged(request.rid, "none")), args, parse)


def _check(request: Enqueue) -> None:
    for name, value in (("rid", request.rid), ("api", request.api or "-")):
        if not _WORD.fullmatch(value):
            raise RequestError(f"{name} {value!r} can't be used: letters, digits, '.', '_' and '-' only")
    if request.priority not in CLASSES:
        raise RequestError(
            f"priority {request.priority!r} is unknown; use one of {', '.join(CLASSES)}", param="priority"
        )
    if request.on_disconnect not in ("cancel", "continue") and not request.on_disconnect.isdecimal():
        raise RequestError(
            f"on_disconnect {request.on_disconnect!r} is unknown; use cancel, continue or a number of seconds",
            param="on_disconnect",
        )


def _with_seed(params: GenerationRequest) -> GenerationRequest:
    """Draw the seed once, before the script can be sent twice; as text, because Lua's numbers are doubles."""
    if params.sampling.seed:
        return params
    seed = str(secrets.randbits(64))
    return msgspec.structs.replace(params, sampling=msgspec.structs.replace(params.sampling, seed=seed))
